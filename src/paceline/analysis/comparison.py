"""Configurations side by side, and studies configuration by configuration, with significance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from paceline.analysis.accuracy import accuracy_increase
from paceline.analysis.collection import RunCollection, SkippedRecord, collect
from paceline.analysis.communication import run_traffic
from paceline.analysis.contention import CpuContention, find_contention
from paceline.analysis.run_group import (
    RunGroup,
    differing,
    metric_names,
    scales_to_samples,
    settings_key,
    value_text,
)
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.errors import RecordsError

FOLLOW_FROM_LOSS = ("perplexity", "bits_per_byte")
"""Metrics that are significant where the loss is."""
STEP_TIME = "Step time"
SAMPLE_TIME = "Time per 1,000 samples"


@dataclass(frozen=True, slots=True)
class Significance:
    """Of one figure, the first configuration against another."""

    name: str
    other: str
    difference: Difference
    """How much more the first has than the other."""


@dataclass(frozen=True, slots=True)
class Match:
    """Configurations of two studies with the same settings, or the same name."""

    name: str
    first: RunGroup
    other: RunGroup

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Settings that differ though the names are the same, with both values."""
        first, other = self.first.settings, self.other.settings
        return [
            (name, value_text(first.get(name)), value_text(other.get(name)))
            for name in differing((first, other))
        ]

    @property
    def contention(self) -> list[CpuContention]:
        return find_contention((self.first, self.other))


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One figure of a match."""

    match: Match
    first: float | None
    other: float | None
    """The means; None where no run has the figure."""
    change: Difference | None
    """How much more the other has than the first; None where one has no value."""
    is_disturbed: bool = False
    """Whether it is a time and other processes used the machine: then it is not tested."""


@dataclass(frozen=True, slots=True)
class FigureTable:
    title: str
    rows: list[FigureRow]
    is_time: bool = False


@dataclass(frozen=True, slots=True)
class StudyPair:
    """The configurations of two studies, or of two folders of runs."""

    first: str
    other: str
    matches: list[Match]
    tables: list[FigureTable] = field(default_factory=list)
    """Step time first; figures that no match has are not in them."""
    only_first: list[str] = field(default_factory=list)
    only_other: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PairSummary:
    """In how many matches the other study is faster or slower; each match counts once."""

    faster: int
    slower: int
    within_noise: int
    single: int
    """With a single run in one of the two."""
    disturbed: int
    """With CPU contention, so that they are not tested."""
    untimed: int
    """Not timed in both."""
    ratio: float | None
    """Geometric mean over all matches; None where no difference is significant."""


@dataclass(frozen=True, slots=True)
class Comparison:
    groups: list[RunGroup]
    """No two labels are equal."""
    skipped: list[SkippedRecord]
    pairs: list[StudyPair] = field(default_factory=list)
    """Of studies; empty where configurations are compared side by side."""


def read_comparison(paths: Sequence[str]) -> Comparison:
    """Each run is one configuration; a folder or a study has several.

    RecordsError where a path holds nothing that can be read.
    """
    groups: list[RunGroup] = []
    skipped: list[SkippedRecord] = []
    collections = [collect(path) for path in paths]
    _check_distinct(paths, collections)
    for collection in collections:
        skipped += collection.skipped
        if collection.kind == "run":
            groups.append(RunGroup(collection.title, collection.runs))
            continue
        prefix = f"{collection.path.name}: " if len(paths) > 1 else ""
        groups += [
            RunGroup(f"{prefix}{group.label}", group.runs)
            for group in collection.groups
            if group.runs
        ]
    seen: dict[str, int] = {}
    for index, group in enumerate(groups):
        seen[group.label] = seen.get(group.label, 0) + 1
        if seen[group.label] > 1:
            groups[index] = RunGroup(f"{group.label} ({seen[group.label]})", group.runs)
    return Comparison(groups, skipped, match_studies(collections))


def _check_distinct(paths: Sequence[str], collections: Sequence[RunCollection]) -> None:
    """Reject comparisons of runs with themselves."""
    runs = [{run.fingerprint for run in collection.runs} for collection in collections]
    for second, later in enumerate(runs):
        for first, earlier in enumerate(runs[:second]):
            # Studies may share a few runs: the others are worth comparing.
            if later and earlier and (later <= earlier or earlier <= later):
                what = "run was" if len(later) == len(earlier) == 1 else "runs were"
                raise RecordsError(
                    f"the same {what} given twice: {paths[first]} and {paths[second]}"
                )


def significance(groups: Sequence[RunGroup]) -> list[Significance]:
    """The first configuration against each other one: step time, wall time, loss and accuracy.

    Times are compared for the same model and data, loss and accuracy for the same data.
    """
    found = []
    for other in groups[1:]:
        pair = groups[0], other
        one, two = groups[0].settings, other.settings
        has_same_data = one.data_or_task == two.data_or_task
        if one.task == two.task:
            found += _step_times(*pair)
            found += _figure(*pair, "wall time", wall_seconds)
        if has_same_data:
            found += _figure(*pair, "test loss", lambda group: finals(group, "test_loss"))
            accuracy = accuracy_increase(*pair)
            if accuracy is not None:
                found.append(Significance("test accuracy", other.label, accuracy))
            for name in metric_names(pair, ignoring=FOLLOW_FROM_LOSS):
                found += _figure(*pair, name.replace("_", " "), partial(finals, key=name))
    # All of them are reported together, so they are one family of comparisons.
    corrected = correct([one.difference for one in found])
    return [replace(one, difference=gap) for one, gap in zip(found, corrected, strict=True)]


def _step_times(first: RunGroup, other: RunGroup) -> list[Significance]:
    """Per iteration, or per 1,000 samples where batches differ."""
    name, scales = "time per iteration", [1.0, 1.0]
    to_samples = scales_to_samples((first, other))
    if to_samples is not None:
        name, scales = "time per 1,000 samples", to_samples
    means, blocks = (
        [
            [value * scale for value in values(group)]
            for group, scale in zip((first, other), scales, strict=True)
        ]
        for values in (lambda group: group.iteration_means, _blocks)
    )
    if not means[0] or not sum(means[1]):
        return []
    return [Significance(name, other.label, relative_increase(*means, *blocks))]


def _figure(
    first: RunGroup, other: RunGroup, name: str, values: Callable[[RunGroup], list[float]]
) -> list[Significance]:
    own, others = values(first), values(other)
    return (
        [Significance(name, other.label, relative_increase(own, others))]
        if can_be_shares(own, others)
        else []
    )


def can_be_shares(own: Sequence[float], others: Sequence[float]) -> bool:
    """Whether a difference can be a share of the other's mean: not of zero or negative values."""
    return bool(own and others) and min(*own, *others) >= 0 and sum(others) > 0


def _blocks(group: RunGroup) -> list[float]:
    timing = group.timed[0].timing if group.timed else None
    return timing.blocks if timing else []


def wall_seconds(group: RunGroup) -> list[float]:
    return group.values(lambda run: run.wall_seconds, group.shown)


def finals(group: RunGroup, key: str) -> list[float]:
    """A final figure such as test_loss, of runs that did not finish where none did."""
    return group.values(lambda run: run.final(key), group.shown)


def rank_figures(group: RunGroup, figure: str) -> list[float]:
    """A figure of the step times, such as `median`, of each worker of each run."""
    timings = [run.timing for run in group.shown if run.timing is not None]
    return [getattr(rank, figure) for timing in timings for rank in timing.ranks]


def sent_bytes(group: RunGroup) -> list[float]:
    """Of all workers and kinds of traffic, of each run with several workers."""
    return [
        sum(one.bytes_sent for one in run_traffic(run).values())
        for run in group.shown
        if len(run.workers) > 1
    ]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def match_studies(collections: Sequence[RunCollection]) -> list[StudyPair]:
    """The first study against each other one; empty where they are compared side by side.

    Folders of runs match where they hold configurations with the same settings, and more than one:
    a single pair is better shown side by side.
    """
    if len(collections) < 2 or any(one.kind == "run" for one in collections):
        return []
    names = _shortest_names(collections)
    pairs = [
        _match(collections[0], other, names[0], name)
        for other, name in zip(collections[1:], names[1:], strict=True)
    ]
    if all(one.kind == "study" for one in collections):
        return pairs
    has_several = any(len(_by_name(one)) > 1 for one in collections)
    return pairs if has_several and all(pair.matches for pair in pairs) else []


def _shortest_names(collections: Sequence[RunCollection]) -> list[str]:
    """The shortest path suffixes that are unique."""
    paths = [one.path for one in collections]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]


def _by_name(collection: RunCollection) -> dict[str, RunGroup]:
    """The configurations that were run, by unique names."""
    named: dict[str, RunGroup] = {}
    labels = [group.label for group in collection.groups if group.runs]
    seen: set[int] = set()
    for chapter in collection.chapters:
        for group in chapter.groups:
            if not group.runs or id(group.runs[0]) in seen:
                continue
            seen.add(id(group.runs[0]))
            is_unique = labels.count(group.label) == 1
            whole = name = group.label if is_unique else f"{chapter.title}: {group.label}"
            number = 2
            while name in named:
                name, number = f"{whole} ({number})", number + 1
            named[name] = group
    return named


def _match(
    first: RunCollection, other: RunCollection, first_name: str, other_name: str
) -> StudyPair:
    """By settings; the rest of two studies by name if model and data are the same."""
    left, right = _by_name(first), _by_name(other)
    matched: dict[str, Match] = {}
    by_settings: dict[str, list[str]] = {}
    for name, group in right.items():
        by_settings.setdefault(settings_key(group.settings), []).append(name)
    for name, group in left.items():
        same = by_settings.get(settings_key(group.settings))
        if same:
            matched[name] = Match(name, group, right.pop(same.pop(0)))
    if first.kind == other.kind == "study":
        for name, group in left.items():
            if name not in matched and name in right and _is_same_work(group, right[name]):
                matched[name] = Match(name, group, right.pop(name))
    matches = [matched[name] for name in left if name in matched]
    return StudyPair(
        first_name,
        other_name,
        matches,
        _tables(matches),
        [name for name in left if name not in matched],
        list(right),
    )


def _is_same_work(first: RunGroup, other: RunGroup) -> bool:
    return first.settings.task == other.settings.task


def _tables(matches: Sequence[Match]) -> list[FigureTable]:
    title, step = STEP_TIME, _step_seconds
    if any(scales_to_samples((one.first, one.other)) for one in matches):
        title, step = SAMPLE_TIME, _sample_seconds
    groups = [group for one in matches for group in (one.first, one.other)]
    tables = [
        _table(matches, title, step, is_time=True),
        _table(matches, "Time to target", _target_seconds, is_time=True),
        _table(
            matches,
            "Test accuracy",
            lambda group: group.finals("test_accuracy"),
            lambda one: accuracy_increase(one.other, one.first),
        ),
        _table(matches, "Test loss", lambda group: group.finals("test_loss")),
        *(_metric_table(matches, name) for name in metric_names(groups, FOLLOW_FROM_LOSS)),
    ]
    # All rows are read together, so those that are tested are one family of comparisons.
    tested = [row for table in tables for row in table.rows if row.change and not row.is_disturbed]
    changes = correct([row.change for row in tested if row.change])
    corrected = {id(row): change for row, change in zip(tested, changes, strict=True)}
    return [
        FigureTable(
            table.title,
            [replace(row, change=corrected.get(id(row), row.change)) for row in table.rows],
            table.is_time,
        )
        for table in tables
        if any(row.change is not None for row in table.rows)
    ]


def _metric_table(matches: Sequence[Match], name: str) -> FigureTable:
    title = name.replace("_", " ").capitalize()
    return _table(matches, title, lambda group: group.finals(name))


def _table(
    matches: Sequence[Match],
    title: str,
    values: Callable[[RunGroup], list[float]],
    increase: Callable[[Match], Difference | None] | None = None,
    *,
    is_time: bool = False,
) -> FigureTable:
    """`increase` is how much more the other has, where it is not that of the values alone."""
    rows = []
    for one in matches:
        first, other = values(one.first), values(one.other)
        if not first and not other:
            continue
        change = None
        if can_be_shares(other, first):
            change = increase(one) if increase else relative_increase(other, first)
        means = [fmean(own) if own else None for own in (first, other)]
        is_disturbed = is_time and bool(one.contention)
        rows.append(FigureRow(one, means[0], means[1], change, is_disturbed))
    return FigureTable(title, rows, is_time)


def _step_seconds(group: RunGroup) -> list[float]:
    return group.iteration_means


def _sample_seconds(group: RunGroup) -> list[float]:
    """Empty if the number of samples is unknown."""
    samples = group.samples_in_iteration
    return [seconds * 1000 / samples for seconds in group.iteration_means] if samples else []


def _target_seconds(group: RunGroup) -> list[float]:
    """Empty unless all finished runs reached it: the others would have taken longer."""
    times = group.values(lambda run: run.seconds_to_target)
    return times if len(times) == len(group.finished) else []


def summarize_pair(pair: StudyPair) -> PairSummary | None:
    """None where no match was timed in both studies."""
    if not pair.tables or pair.tables[0].title not in (STEP_TIME, SAMPLE_TIME):
        return None
    rows = [row for row in pair.tables[0].rows if row.change is not None]
    every = [row.change for row in rows if row.change is not None]
    tested = [row.change for row in rows if row.change is not None and not row.is_disturbed]
    significant = [one for one in tested if one.is_significant]
    return PairSummary(
        faster=sum(one.share < 0 for one in significant),
        slower=sum(one.share > 0 for one in significant),
        within_noise=sum(one.across_runs and not one.is_significant for one in tested),
        single=sum(not one.across_runs for one in tested),
        disturbed=sum(row.is_disturbed for row in rows),
        untimed=len(pair.matches) - len(every),
        # Where nothing is beyond noise, neither is the mean of it.
        ratio=math.exp(fmean(math.log(max(1 + one.share, 1e-12)) for one in every))
        if significant
        else None,
    )
