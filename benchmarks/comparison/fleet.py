"""The groups that take turns on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from comparison.group import TITLES, ContenderError, Group, reason_for_absence
from comparison.left_out import LeftOut

Result = TypeVar("Result")


class Fleet:
    """Groups of the same size, started when first needed; those that fail are left out."""

    def __init__(self, world_size: int, left_out: LeftOut) -> None:
        self.world_size = world_size
        self.left_out = left_out
        self._groups: dict[str, Group] = {}
        self._out: set[str] = set()

    def starting(self, names: Sequence[str]) -> list[str]:
        """Those of them that can run; they do, from now on."""
        for name in names:
            if name not in self._groups and name not in self._out:
                reason = reason_for_absence(name)
                try:
                    if reason is not None:
                        raise ContenderError(reason)
                    self._groups[name] = Group(name, self.world_size)
                except ContenderError as error:
                    self._leave_out(name, error)
        return [name for name in names if name in self._groups]

    def attempt(self, name: str, action: Callable[[Group], Result]) -> Result | None:
        """What a group does; None where it fails, which leaves it out from now on."""
        try:
            return action(self._groups[name])
        except ContenderError as error:
            self._leave_out(name, error)
            self._groups.pop(name).close()
            return None

    def _leave_out(self, name: str, error: ContenderError) -> None:
        self._out.add(name)
        self.left_out.add(TITLES[name], f"{self.world_size} workers", str(error))

    def close(self) -> None:
        for group in self._groups.values():
            group.hang_up()
        for group in self._groups.values():
            group.close()
        self._groups.clear()
