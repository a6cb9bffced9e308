"""Studies compared cell by cell: cells with the same settings, or the same name, make a row.

The same rows go to the terminal and to the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from paceline import formatting
from paceline.analysis.accuracy import accuracy_increase
from paceline.analysis.collection import RunCollection
from paceline.analysis.contention import CpuContention, disturbances
from paceline.analysis.run_group import RunGroup, differing, settings_key, value_text
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.report.sections.configuration import machine
from paceline.report.wording import interval_note, rerun_sentence

SINGLE = "single run"
"""In place of a significance: the spread between runs is unknown."""
CONTENTION = "CPU contention"
"""In place of the significance of a time: other processes used the machine."""


@dataclass(frozen=True, slots=True)
class MatchedCell:
    name: str
    first: RunGroup
    other: RunGroup

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Settings that differ though the names are the same, with both values."""
        first, other = self.first.config, self.other.config
        return [
            (name, value_text(getattr(first, name)), value_text(getattr(other, name)))
            for name in differing((first, other))
        ]

    @property
    def contention(self) -> list[CpuContention]:
        return disturbances((self.first, self.other))


@dataclass(frozen=True, slots=True)
class StudyPair:
    """The cells of two studies, or folders of runs."""

    first: str
    other: str
    cells: list[MatchedCell]
    only_first: list[str] = field(default_factory=list)
    only_other: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FigureRow:
    name: str
    first: str
    other: str
    """The mean, or why there is none."""
    change: Difference | None
    """How much more the other has than the first; None where one has no value."""
    is_disturbed: bool = False
    """Whether it is a time and other processes used the machine: then it is not tested."""

    @property
    def ratio(self) -> str:
        return "-" if self.change is None else f"{1 + self.change.share:.3f}"

    @property
    def interval(self) -> str:
        if self.change is None or not self.change.across_runs or self.is_disturbed:
            return "-"
        # No figure is negative, so neither is a ratio.
        return f"{max(0.0, 1 + self.change.low):.3f} to {1 + self.change.high:.3f}"

    @property
    def significance(self) -> str:
        if self.change is None:
            return "-"
        if self.is_disturbed:
            return CONTENTION
        if not self.change.across_runs:
            return SINGLE
        return "significant" if self.change.is_significant else "within noise"


@dataclass(frozen=True, slots=True)
class FigureTable:
    title: str
    rows: list[FigureRow]


def pair_up(collections: Sequence[RunCollection]) -> list[StudyPair]:
    """The first study against each other one; none where these are not to be compared by cell.

    Studies always are. Folders of runs are where they hold cells with the same settings, and more
    than one cell: a single pair is better shown side by side.
    """
    if len(collections) < 2 or any(one.kind == "run" for one in collections):
        return []
    names = _names(collections)
    pairs = [
        _pair(collections[0], other, names[0], name)
        for other, name in zip(collections[1:], names[1:], strict=True)
    ]
    if all(one.kind == "study" for one in collections):
        return pairs
    has_several = any(len(_named(one)) > 1 for one in collections)
    return pairs if has_several and all(pair.cells for pair in pairs) else []


def _names(collections: Sequence[RunCollection]) -> list[str]:
    """As short as tells them apart."""
    paths = [one.path for one in collections]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def _named(collection: RunCollection) -> dict[str, RunGroup]:
    """The cells that were run, by names that no two of them share."""
    named: dict[str, RunGroup] = {}
    labels = [cell.label for cell in collection.cells if cell.runs]
    seen: set[int] = set()
    for chapter in collection.chapters:
        for cell in chapter.cells:
            if not cell.runs or id(cell.runs[0]) in seen:
                continue
            seen.add(id(cell.runs[0]))
            is_unique = labels.count(cell.label) == 1
            whole = name = cell.label if is_unique else f"{chapter.title}: {cell.label}"
            number = 2
            while name in named:
                name, number = f"{whole} ({number})", number + 1
            named[name] = cell
    return named


def _pair(
    first: RunCollection, other: RunCollection, first_name: str, other_name: str
) -> StudyPair:
    """By settings; what is left of two studies, by name if model and data are the same."""
    left, right = _named(first), _named(other)
    matched: dict[str, MatchedCell] = {}
    by_settings: dict[str, list[str]] = {}
    for name, cell in right.items():
        by_settings.setdefault(settings_key(cell.config), []).append(name)
    for name, cell in left.items():
        same = by_settings.get(settings_key(cell.config))
        if same:
            matched[name] = MatchedCell(name, cell, right.pop(same.pop(0)))
    if first.kind == other.kind == "study":
        for name, cell in left.items():
            if name not in matched and name in right and _is_same_work(cell, right[name]):
                matched[name] = MatchedCell(name, cell, right.pop(name))
    return StudyPair(
        first_name,
        other_name,
        [matched[name] for name in left if name in matched],
        [name for name in left if name not in matched],
        list(right),
    )


def _is_same_work(first: RunGroup, other: RunGroup) -> bool:
    return (first.config.model, first.config.data) == (other.config.model, other.config.data)


def figure_tables(pair: StudyPair) -> list[FigureTable]:
    """Step time first; a figure that no cell has is left out."""
    title, step = "Step time", _step
    if any(
        one.first.config.global_batch_size != one.other.config.global_batch_size
        for one in pair.cells
    ):
        title, step = "Time per 1,000 samples", _per_samples
    tables = [
        _table(pair, title, step, formatting.seconds, is_time=True),
        _table(pair, "Time to target", _to_target, formatting.seconds, is_time=True),
        _table(
            pair,
            "Test accuracy",
            lambda cell: cell.finals("test_accuracy"),
            formatting.number,
            lambda one: accuracy_increase(one.other, one.first),
        ),
        _table(pair, "Test loss", lambda cell: cell.finals("test_loss"), formatting.number),
    ]
    # All rows are read together, so those that are tested are one family of comparisons.
    tested = [row for table in tables for row in table.rows if row.change and not row.is_disturbed]
    changes = correct([row.change for row in tested if row.change])
    corrected = {id(row): change for row, change in zip(tested, changes, strict=True)}
    return [
        FigureTable(
            table.title,
            [replace(row, change=corrected.get(id(row), row.change)) for row in table.rows],
        )
        for table in tables
        if any(row.change is not None for row in table.rows)
    ]


def _table(
    pair: StudyPair,
    title: str,
    values: Callable[[RunGroup], list[float]],
    text: Callable[[float], str],
    increase: Callable[[MatchedCell], Difference | None] | None = None,
    *,
    is_time: bool = False,
) -> FigureTable:
    """`increase` is how much more the second has, where it is not that of the values alone."""
    rows = []
    for one in pair.cells:
        sides = [values(cell) for cell in (one.first, one.other)]
        if not any(sides):
            continue
        shown = [
            text(fmean(own)) if own else _no_value(cell)
            for cell, own in zip((one.first, one.other), sides, strict=True)
        ]
        change = None
        if all(sides) and fmean(sides[0]) > 0:
            change = increase(one) if increase else relative_increase(sides[1], sides[0])
        is_disturbed = is_time and bool(one.contention)
        rows.append(FigureRow(one.name, shown[0], shown[1], change, is_disturbed))
    return FigureTable(title, rows)


def _no_value(cell: RunGroup) -> str:
    """Why there is none, as short as a table wants it."""
    if cell.finished:
        return "none"
    statuses = {run.status for run in cell.runs}
    return statuses.pop() if len(statuses) == 1 else "not finished"


def _step(cell: RunGroup) -> list[float]:
    return cell.iteration_means


def _per_samples(cell: RunGroup) -> list[float]:
    return [seconds * 1000 / cell.samples_in_iteration for seconds in cell.iteration_means]


def _to_target(cell: RunGroup) -> list[float]:
    """None unless all finished runs reached it: the others would have taken longer."""
    times = [spent for run in cell.finished if (spent := run.seconds_to_target) is not None]
    return times if len(times) == len(cell.finished) else []


def headline(pair: StudyPair) -> str:
    """In how many cells the other study is faster or slower, and by how much on average."""
    if not pair.cells:
        return (
            f"{pair.other} and {pair.first} have no configurations with the same settings or names."
        )
    tables = figure_tables(pair)
    count = f"{len(pair.cells)} matching configuration{'s' * (len(pair.cells) != 1)}"
    if not tables or tables[0].title not in ("Step time", "Time per 1,000 samples"):
        return f"{pair.other} against {pair.first}: {count}, none of them timed in both."
    disturbed = sum(row.is_disturbed for row in tables[0].rows if row.change is not None)
    every = [row.change for row in tables[0].rows if row.change is not None]
    changes = [row.change for row in tables[0].rows if row.change and not row.is_disturbed]
    sure = [one for one in changes if one.across_runs and one.is_significant]
    parts = {
        "faster": sum(one.share < 0 for one in sure),
        "slower": sum(one.share > 0 for one in sure),
        "within noise": sum(one.across_runs and not one.is_significant for one in changes),
        "with a single run (significance unknown)": sum(not one.across_runs for one in changes),
        "with CPU contention (not tested)": disturbed,
        "not timed in both": len(pair.cells) - len(every),
    }
    told = ", ".join(f"{number} {name}" for name, number in parts.items() if number)
    mean = ""
    # Where nothing is beyond noise, neither is the mean of it.
    if sure:
        ratio = math.exp(fmean(math.log(max(1 + one.share, 1e-12)) for one in every))
        mean = f" Geometric mean of the ratios: {ratio:.3f}."
    contention = [found for one in pair.cells for found in one.contention]
    return (
        f"{pair.other} against {pair.first}, {tables[0].title.lower()} of {count}: {told}."
        f"{mean}{rerun_sentence(contention)}"
    )


def notes(pair: StudyPair) -> list[str]:
    """How to read the tables."""
    found = [
        "Ratio: the second study's mean over the first's. The rows of all tables are tested"
        " together: the chance that any of them is significant without a real difference is at most"
        " 5%."
    ]
    rows = [row for table in figure_tables(pair) for row in table.rows]
    if note := interval_note([row.change for row in rows if row.change]):
        found.append(note)
    if any(row.significance == SINGLE for row in rows):
        found.append(f"{SINGLE.capitalize()}: one of the two has no repeats, so the spread between"
                     " runs, and with it the significance, is unknown.")  # fmt: skip
    if any(row.significance == CONTENTION for row in rows):
        found.append(f"{CONTENTION}: other processes used the machine during runs of one of the"
                     " two, so its times are not tested.")  # fmt: skip
    return found


def differences(pair: StudyPair) -> list[tuple[str, str]]:
    """What else differs between the two studies: settings of matching cells, and machines."""
    changed: dict[tuple[str, str, str], list[str]] = {}
    for one in pair.cells:
        for change in one.changes:
            changed.setdefault(change, []).append(one.name)
    found = [
        (
            f"{name.replace('_', '-')}:",
            f"{first} in {pair.first}, {other} in {pair.other}"
            + ("" if len(cells) == len(pair.cells) else f" ({'; '.join(cells)})"),
        )
        for (name, first, other), cells in changed.items()
    ]
    facts = [_facts([getattr(one, side) for one in pair.cells]) for side in ("first", "other")]
    for name in facts[0]:
        if name in facts[1] and facts[0][name] != facts[1][name]:
            texts = ["; ".join(sorted(side[name])) for side in facts]
            found.append((f"{name}:", f"{texts[0]} in {pair.first}, {texts[1]} in {pair.other}"))
    return found


def _facts(cells: Sequence[RunGroup]) -> dict[str, set[str]]:
    facts: dict[str, set[str]] = {}
    for cell in cells:
        for run in cell.finished:
            for name, text in machine(run):
                facts.setdefault(name, set()).add(text)
    return facts


def unmatched(pair: StudyPair) -> list[tuple[str, str]]:
    sides = ((pair.first, pair.only_first), (pair.other, pair.only_other))
    return [(f"Only in {name}:", "; ".join(cells)) for name, cells in sides if cells]
