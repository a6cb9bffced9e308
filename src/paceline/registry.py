"""Named things that a user can pick, and the way to bring one's own.

An entry names its target as `package.module:attribute` and is imported only when it is used, so
that listing what exists, or refusing a misspelt name, does not load torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from paceline.errors import UnknownNameError, UserCodeError, bare, error_line, shown, suggest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    target: str
    summary: str
    preset: Mapping[str, object]
    """Arguments that the name stands for, besides its target."""


class Registry(Generic[T]):
    """Entries of one kind ("model", "strategy", ...), by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str, target: str, summary: str, **preset: object) -> None:
        """Add an entry; a taken name is refused, so that nothing is replaced by accident."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered already")
        self._entries[name] = Entry(name, target, summary, preset)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def preset(self, name: str) -> Mapping[str, object]:
        """What a registered name adds to its target; nothing for a user's own."""
        return self._entries[name].preset if name in self._entries else {}

    def check(self, name: str) -> None:
        """Refuse an unknown name, without importing what a known one stands for."""
        if name in self._entries or ":" in name:
            return
        hint = suggest(name, self._entries, most=3)
        if not hint.endswith("?"):
            hint += ", or give your own as package.module:name"
        raise UnknownNameError(f"unknown {self.kind} {shown(name)}: {hint}")

    def load(self, name: str) -> T:
        """The object behind a registered name or behind a user's `package.module:name`."""
        self.check(name)
        if name in self._entries:
            target = _import(self._entries[name].target)
        else:
            target = load_user_object(self.kind, name)
        return cast("T", target)


def load_user_object(kind: str, path: str) -> object:
    """Import a user's own `package.module:name`, looking in the current folder too.

    Whatever goes wrong inside the user's module becomes one line that names it and the cause.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UserCodeError(f"{kind} {shown(path)}: write it as package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        cause = error_line(error)
        raise UserCodeError(
            f"{kind} {shown(path)}: {bare(module_name)} does not import: {cause}"
        ) from error
    loaded: object = getattr(module, attribute, None)
    if loaded is None:
        raise UserCodeError(
            f"{kind} {shown(path)}: module {bare(module_name)} has no {bare(attribute)}"
        )
    if not callable(loaded):
        raise UserCodeError(
            f"{kind} {shown(path)}: {bare(attribute)} must be a class or a function"
        )
    return loaded


def _import(target: str) -> object:
    module_name, _, attribute = target.partition(":")
    loaded: object = getattr(importlib.import_module(module_name), attribute)
    return loaded
