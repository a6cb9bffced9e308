"""What the builders of sections share: the cells of a chapter with their place among colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.analysis.curves import Curve
from paceline.analysis.ranking import rank_groups
from paceline.analysis.run_group import RunGroup
from paceline.report.charts.bars import Bar, Part
from paceline.report.charts.lines import Series
from paceline.report.document import Text

MOST_DRAWN = 10
"""Cells in a figure: more cannot be told apart. Tables have them all."""


@dataclass(frozen=True, slots=True)
class SectionContext:
    """The cells of a chapter, and the few of them that figures show."""

    name: str
    """Of the chapter: what names of figures begin with."""
    cells: Sequence[RunGroup]
    places: dict[int, int]
    """Of the cells that are drawn, by identity: which colour each has."""
    comm: Sequence[Path] = ()
    """Files with measurements of the network."""

    @property
    def plotted(self) -> list[RunGroup]:
        return [cell for cell in self.cells if id(cell) in self.places]

    @property
    def finished(self) -> list[RunGroup]:
        return [cell for cell in self.cells if cell.finished]

    def place(self, cell: RunGroup) -> int:
        return self.places[id(cell)]

    def figure(self, section: str, part: str = "") -> str:
        """The name of a figure, unique in the report."""
        return "-".join(filter(None, (self.name, section, part)))

    def drawn_note(self) -> list[Text]:
        """Said where figures leave cells out."""
        left = len(self.cells) - len(self.plotted)
        if not left:
            return []
        return [
            Text(
                f"Figures show {len(self.plotted)} of {len(self.cells):,} configurations: the"
                " fastest and slowest ones. Tables have all of them.",
                "note",
            )
        ]


def outline(name: str, cells: Sequence[RunGroup], comm: Sequence[Path] = ()) -> SectionContext:
    places = {id(cell): place for place, cell in enumerate(_choose(cells))}
    return SectionContext(name, cells, places, comm)


def _choose(cells: Sequence[RunGroup]) -> Iterator[RunGroup]:
    """All, or as many as a figure holds: mostly the fastest, some of the slowest."""
    if len(cells) <= MOST_DRAWN:
        yield from cells
        return
    ranking = [paced.cell for paced in rank_groups(cells).ranking]
    slowest = MOST_DRAWN // 3
    chosen = ranking[: MOST_DRAWN - slowest] + ranking[MOST_DRAWN - slowest :][-slowest:]
    chosen = chosen or list(cells[:MOST_DRAWN])
    identities = {id(cell) for cell in chosen}
    yield from (cell for cell in cells if id(cell) in identities)


def series(label: str, curve: Curve, place: int) -> Series:
    has_spread = not curve.is_exact
    return Series(
        label,
        curve.x.tolist(),
        curve.middle.tolist(),
        curve.low.tolist() if has_spread else (),
        curve.high.tolist() if has_spread else (),
        place=place,
    )


def mean_bar(label: str, values: Sequence[float], text: Callable[[float], str], place: int) -> Bar:
    """The mean of a cell's runs, with their spread."""
    mean = math.fsum(values) / len(values)
    part = Part("mean", mean, text(mean))
    return Bar(label, [part], text(mean), min(values), max(values), place)


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
