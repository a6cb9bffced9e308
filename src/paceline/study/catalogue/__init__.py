"""The studies that come with paceline, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UnknownNameError, shown, suggest
from paceline.registry import Entry

CATALOGUE = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in CATALOGUE.glob("*.yaml"))


def find(name_or_path: str) -> Path:
    """Return the file of a study by its name or path."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path
    if name_or_path not in names():
        hint = suggest(name_or_path, names())
        raise UnknownNameError(
            f"unknown study {shown(name_or_path)}: {hint}, or the path of a .yaml file"
        )
    return CATALOGUE / f"{name_or_path}.yaml"


class Shipped:
    """The catalogue as registry entries, with the titles of the studies."""

    def __iter__(self) -> Iterator[Entry]:
        # Reading YAML is slow to import, and most commands need only the names.
        from paceline.study.cells import load

        for name in names():
            path = find(name)
            yield Entry(name, str(path), load(path).study.title, {})
