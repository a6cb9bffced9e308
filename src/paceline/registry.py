"""Registries of named implementations, extensible with user-defined ones.

An entry refers to its target as `package.module:attribute`, which is imported only when used, so
listing the entries or rejecting a misspelled name does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from paceline.config.conversion import convert_options
from paceline.errors import (
    PacelineError,
    UnknownNameError,
    UserCodeError,
    bare,
    error_line,
    shown,
    suggest,
)

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered name."""

    name: str
    target: str
    summary: str
    preset: Mapping[str, object]
    """Arguments that the name passes to its target."""
    tags: frozenset[str] = frozenset()
    """Properties that can be read without importing the target."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Documented options, which `paceline list` shows without importing the target."""
    argument: str = ""
    """What must follow the name and a colon, such as PATH; empty if nothing does."""

    @property
    def usage(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


class Registry(Generic[T]):
    """Entries of one kind ("model", "strategy", ...) by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(
        self,
        name: str,
        target: str,
        summary: str,
        *,
        tags: Iterable[str] = (),
        options: Mapping[str, str] | None = None,
        argument: str = "",
        **preset: object,
    ) -> None:
        """Add an entry; raises ValueError if the name is already registered."""
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is already registered")
        self._entries[name] = Entry(
            name, target, summary, preset, frozenset(tags), options or {}, argument
        )

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def tagged(self, tag: str) -> frozenset[str]:
        """Return the names of the entries with a tag."""
        return frozenset(entry.name for entry in self if tag in entry.tags)

    def preset(self, name: str) -> Mapping[str, object]:
        """Return the preset arguments of a registered name; empty for user-defined objects."""
        return self._entries[name].preset if name in self._entries else {}

    def split(self, name: str) -> tuple[Entry | None, str]:
        """Return the entry of a name and its argument; None for user-defined objects."""
        if name in self._entries:
            return self._entries[name], ""
        prefix, _, argument = name.partition(":")
        entry = self._entries.get(prefix)
        return (entry, argument) if entry and entry.argument else (None, "")

    def check(self, name: str) -> None:
        """Raise UnknownNameError for an unknown name; does not import the target of a known one."""
        entry, argument = self.split(name)
        if entry and entry.argument and not argument:
            raise UnknownNameError(f"{self.kind} {shown(name)}: use {entry.usage}")
        if entry or ":" in name:
            return
        hint = suggest(name, self._entries, most=3)
        if not hint.endswith("?"):
            hint += ", or use your own as package.module:name"
        raise UnknownNameError(f"unknown {self.kind} {shown(name)}: {hint}")

    def load(self, name: str) -> T:
        """Return the object of a registered name or of a user-defined `package.module:name`."""
        self.check(name)
        entry, _ = self.split(name)
        target = _import(entry.target) if entry else load_user_object(self.kind, name)
        return cast("T", target)

    def load_class(self, name: str, base: type[B], public_name: str) -> type[B]:
        """Like `load`; raises UserCodeError unless the object is a subclass of `base`."""
        loaded: object = self.load(name)
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            raise UserCodeError(f"{self.kind} {name!r}: must be a subclass of {public_name}")
        return loaded

    def create(self, name: str, class_: type[B], options: Mapping[str, str]) -> B:
        """Create an instance of a loaded class from its preset and options given as text.

        All invalid options are reported at once.
        """
        arguments: dict[str, Any] = convert_options(f"{self.kind} {name}", class_, options)
        try:
            return class_(**{**self.preset(name), **arguments})
        except PacelineError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"{self.kind} {name!r} could not be built: {error_line(error)}"
            ) from error


def load_user_object(kind: str, path: str) -> object:
    """Import a user-defined `package.module:name`; the current folder is on the search path.

    Any exception raised by the user's module becomes a one-line UserCodeError.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise UserCodeError(f"{kind} {shown(path)}: expected package.module:name")
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.insert(0, current_folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        cause, first = error_line(error), module_name.partition(".")[0]
        # A module that the user's module imports may be missing, too.
        if isinstance(error, ModuleNotFoundError) and error.name == first:
            cause = (
                f"there is no such module in this folder: run the command in the folder that has"
                f" {bare(first)}, or add that folder to PYTHONPATH"
            )
        raise UserCodeError(
            f"{kind} {shown(path)}: cannot import {bare(module_name)}: {cause}"
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
