"""What sections share: their registry, the groups of a chapter, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline import formatting
from paceline.analysis.curves import Curve
from paceline.analysis.ranking import rank_groups
from paceline.analysis.run_group import RunGroup, metric_names
from paceline.analysis.statistics import half_interval
from paceline.report.charts.bars import Bar, BarChart, Part, draw_bars
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.document import Block, Figure, Table, Text

MAX_PLOTTED = 10
"""Groups in a figure: more are hard to distinguish. Tables show all of them."""

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class SectionContext:
    """The groups of a chapter, and the ones that figures show."""

    name: str
    """Prefix of the chapter's figure names."""
    groups: Sequence[RunGroup]
    color_indices: dict[int, int]
    """By `id` of each plotted group; the same in all figures of a chapter."""
    comm: Sequence[Path] = ()
    """Records of `paceline comm`."""

    @property
    def plotted(self) -> list[RunGroup]:
        return [group for group in self.groups if self.is_plotted(group)]

    @property
    def finished(self) -> list[RunGroup]:
        return [group for group in self.groups if group.finished]

    @property
    def measured(self) -> list[RunGroup]:
        return [group for group in self.groups if group.measured]

    @property
    def is_one_run(self) -> bool:
        """Whether there is nothing to compare."""
        return len(self.groups) == 1 and len(self.groups[0].runs) == 1

    @property
    def has_accuracy(self) -> bool:
        runs = (run for group in self.groups for run in group.shown)
        return any(run.final("test_accuracy") is not None for run in runs)

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics besides accuracy."""
        return metric_names(self.groups)

    def is_plotted(self, group: RunGroup) -> bool:
        return id(group) in self.color_indices

    def color_index(self, group: RunGroup) -> int:
        return self.color_indices[id(group)]

    def figure_name(self, section: str, part: str = "") -> str:
        """Unique in the report."""
        return "-".join(filter(None, (self.name, section, part)))

    def plotted_note(self) -> Iterator[Text]:
        """Which groups figures show, unless these are all."""
        plotted = len(self.plotted)
        if plotted < len(self.groups):
            yield note(
                f"Figures show {plotted} of {len(self.groups):,} configurations: the"
                " fastest and slowest ones. Tables have all of them."
            )


def section_context(
    name: str, groups: Sequence[RunGroup], comm: Sequence[Path] = ()
) -> SectionContext:
    indices = {id(group): index for index, group in enumerate(_choose_plotted(groups))}
    return SectionContext(name, groups, indices, comm)


def _choose_plotted(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """All groups, or as many as a figure holds: mostly the fastest, some of the slowest."""
    if len(groups) <= MAX_PLOTTED:
        return list(groups)
    ranking = [ranked.group for ranked in rank_groups(groups).entries]
    slowest = MAX_PLOTTED // 3
    chosen = ranking[: MAX_PLOTTED - slowest] + ranking[MAX_PLOTTED - slowest :][-slowest:]
    identities = {id(group) for group in chosen or groups[:MAX_PLOTTED]}
    return [group for group in groups if id(group) in identities]


Build = Callable[[SectionContext], Iterable[Block]]


@dataclass(frozen=True, slots=True)
class RegisteredSection:
    title: str | Callable[[SectionContext], str]
    """A function if it depends on the data."""
    build: Build

    def title_in(self, context: SectionContext) -> str:
        return self.title if isinstance(self.title, str) else self.title(context)


SECTIONS: dict[str, RegisteredSection] = {}
"""By name; `paceline.report.sections` imports the modules that register them."""


def section(name: str, title: str | Callable[[SectionContext], str]) -> Callable[[Build], Build]:
    """Register a function that yields the blocks of a section; one that yields none is omitted."""

    def register(build: Build) -> Build:
        if name in SECTIONS:
            raise ValueError(f"section {name!r} is registered twice")
        SECTIONS[name] = RegisteredSection(title, build)
        return build

    return register


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """One column of a table.

    `get` returns a text, a value, a list of values or None. `format` turns a value into text; a
    list is shown as its mean with min and max, None and an empty list as a dash. With
    `has_interval`, the mean of several repeats has its 95% confidence interval.
    """

    heading: str
    get: Callable[[Row], Any]
    format: Callable[[Any], str] = str
    has_interval: bool = False

    def text(self, row: Row) -> str:
        value = self.get(row)
        if value is None:
            return "-"
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            return self.format(value)
        half = half_interval(value) if self.has_interval else None
        return formatting.spread(value, self.format, half)


def table(
    rows: Iterable[Row],
    *columns: Column[Row],
    text_columns: int = 1,
    is_compact: bool = False,
) -> Table:
    """A table with a row per item; `text_columns` at the left hold text, the others numbers."""
    return Table(
        [column.heading for column in columns],
        [tuple(column.text(row) for column in columns) for row in rows],
        text_columns,
        is_compact,
    )


def answer(text: str) -> Text:
    return Text(text, "answer")


def note(text: str) -> Text:
    return Text(text, "note")


def interval_note(groups: Sequence[RunGroup]) -> Iterator[Text]:
    """What ± is, where a group has repeats."""
    counts = sorted({len(group.finished) for group in groups if len(group.finished) > 1})
    if counts:
        span = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        yield note(
            f"±: 95% confidence interval of the mean over {span} runs (Student's t). In"
            " parentheses: min–max of the runs."
        )


def line_figure(name: str, chart: LineChart) -> Figure:
    return Figure(name, chart.label, draw_lines(chart))


def curve_series(label: str, curve: Curve, color_index: int) -> Series:
    has_spread = not curve.is_exact
    return Series(
        label,
        curve.x.tolist(),
        curve.middle.tolist(),
        curve.low.tolist() if has_spread else (),
        curve.high.tolist() if has_spread else (),
        color_index=color_index,
    )


def mean_bars(
    context: SectionContext,
    values: Iterable[tuple[RunGroup, Sequence[float]]],
    format: Callable[[float], str],
    label: Callable[[RunGroup], str] = lambda group: group.label,
) -> list[Bar]:
    """A bar per plotted group with values: their mean, with min and max as whiskers."""
    bars = []
    for group, own in values:
        if own and context.is_plotted(group):
            mean = math.fsum(own) / len(own)
            part = Part("mean", mean, format(mean))
            bars.append(
                Bar(
                    label(group), [part], format(mean), min(own), max(own),
                    context.color_index(group),
                )
            )  # fmt: skip
    return bars


def bar_figure(
    name: str, title: str, axis: str, bars: Sequence[Bar], quantity: str = ""
) -> Iterator[Figure]:
    """Nothing without bars."""
    if bars:
        yield Figure(name, title, draw_bars(BarChart(title, axis, bars, quantity)))
