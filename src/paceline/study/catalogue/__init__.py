"""The studies that come with paceline, by name.

What reads YAML is imported only when a file is read, so that listing commands stays quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UnknownNameError, shown, suggest
from paceline.registry import Entry

CATALOGUE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in CATALOGUE.glob("*.yaml"))


def find(given: str) -> Path:
    """The file of a study, given by its path or by its name."""
    path = Path(given)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if given not in names():
        hint = suggest(given, names())
        raise UnknownNameError(
            f"unknown study {shown(given)}: {hint}, or give a .yaml file of your own"
        )
    return CATALOGUE / f"{given}.yaml"


class Shipped:
    """The catalogue as entries with the studies' titles."""

    def __iter__(self) -> Iterator[Entry]:
        from paceline.study.cells import load

        for name in names():
            path = find(name)
            yield Entry(name, str(path), load(path).study.title, {})
