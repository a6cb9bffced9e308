"""The groups that take turns on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from comparison.group import TITLES, ContenderError, Group, reason_for_absence

Result = TypeVar("Result")


class Fleet:
    """Groups of the same size, started when first needed; those that fail are left out."""

    def __init__(self, world_size: int, left_out: dict[str, str]) -> None:
        self.world_size = world_size
        self.left_out = left_out
        """The reasons, by title; filled here."""
        self._groups: dict[str, Group] = {}

    def starting(self, names: Sequence[str]) -> list[str]:
        """Those of them that can run; they do, from now on."""
        for name in names:
            title = f"{TITLES[name]}, {self.world_size} workers"
            if name not in self._groups and title not in self.left_out:
                reason = reason_for_absence(name)
                try:
                    if reason is not None:
                        raise ContenderError(reason)
                    self._groups[name] = Group(name, self.world_size)
                except ContenderError as error:
                    self.left_out[title] = str(error)
        return [name for name in names if name in self._groups]

    def attempt(self, name: str, action: Callable[[Group], Result]) -> Result | None:
        """What a group does; None where it fails, which leaves it out from now on."""
        try:
            return action(self._groups[name])
        except ContenderError as error:
            self.left_out[f"{TITLES[name]}, {self.world_size} workers"] = str(error)
            self._groups.pop(name).close()
            return None

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
