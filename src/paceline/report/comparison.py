"""Cells side by side: what was asked differently, what came out, and whether that is significant.

The same rows go to the terminal and to the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline import formatting
from paceline.analysis.accuracy import accuracy_increase
from paceline.analysis.collection import RunCollection, SkippedRecord, collect
from paceline.analysis.communication import run_traffic
from paceline.analysis.phases import run_breakdown
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, describe_workers, differing, value_text
from paceline.analysis.statistics import Difference, correct, relative_increase
from paceline.errors import RecordsError
from paceline.records import PHASES
from paceline.report.sections.outline import known
from paceline.report.study_comparison import StudyPair, pair_up
from paceline.report.wording import interval_name, world_sizes_text


@dataclass(frozen=True, slots=True)
class Compared:
    cells: list[RunGroup]
    """No two labels are equal."""
    left_out: list[SkippedRecord]
    pairs: list[StudyPair] = field(default_factory=list)
    """Of studies, which are compared cell by cell; otherwise cells are put side by side."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class Significance:
    """Of one figure, the first cell against another."""

    name: str
    other: str
    difference: Difference
    """How much more the first has than the other."""

    def words(self) -> str:
        share = f"{_percent(self.difference.share)}%"
        if not self.difference.has_interval:
            return f"{share}; single run, significance unknown"
        # No figure is below zero, so that none can be less by more than all of the other.
        low = max(self.difference.low, -1.0)
        span = f"{_percent(low)}% to {_percent(self.difference.high)}%"
        span = f"{interval_name(self.difference)} {span}"
        if self.difference.across_runs:
            sure = "significant" if self.difference.is_significant else "within noise"
            return f"{share} ({span}): {sure}"
        sure = "within noise" if self.difference.is_tie else "single run, significance unknown"
        return f"{share} ({span} over iterations): {sure}"


def _percent(share: float) -> str:
    """With its sign; what rounds to zero has none."""
    rounded = round(100 * share, 1)
    return f"{rounded:+.1f}" if rounded else "0.0"


def read_compared(paths: Sequence[str]) -> Compared:
    """A run is a cell of its own; of a folder or a study it is each cell.

    RecordsError where a path holds nothing that can be read.
    """
    cells: list[RunGroup] = []
    left_out: list[SkippedRecord] = []
    collections = [collect(path) for path in paths]
    _check_distinct(paths, collections)
    for collection in collections:
        left_out += collection.left_out
        if collection.kind == "run":
            cells.append(RunGroup(collection.title, collection.runs))
            continue
        prefix = f"{collection.path.name}: " if len(paths) > 1 else ""
        cells += [
            RunGroup(f"{prefix}{cell.label}", cell.runs) for cell in collection.cells if cell.runs
        ]
    seen: dict[str, int] = {}
    for index, cell in enumerate(cells):
        seen[cell.label] = seen.get(cell.label, 0) + 1
        if seen[cell.label] > 1:
            cells[index] = RunGroup(f"{cell.label} ({seen[cell.label]})", cell.runs)
    return Compared(cells, left_out, pair_up(collections))


def _check_distinct(paths: Sequence[str], collections: Sequence[RunCollection]) -> None:
    """Refuse to compare runs with themselves."""
    runs = [{run.fingerprint for run in collection.runs} for collection in collections]
    for second, later in enumerate(runs):
        for first, earlier in enumerate(runs[:second]):
            # Studies may share a few runs, of which the others are worth comparing.
            if later and earlier and (later <= earlier or earlier <= later):
                what = "run was" if len(later) == len(earlier) == 1 else "runs were"
                raise RecordsError(
                    f"the same {what} given twice: {paths[first]} and {paths[second]}"
                )


def setting_rows(cells: Sequence[RunGroup]) -> list[Row]:
    """What is the same in all cells is left out."""
    rows = []
    for name in differing([cell.config for cell in cells]):
        texts = [value_text(getattr(cell.config, name)) for cell in cells]
        # A default of one kind of batch or budget is the other one's value: `none` says nothing.
        rows.append(Row(name.replace("_", " "), ["-" if one == "none" else one for one in texts]))
    if len({cell.workers for cell in cells}) > 1 and all(cell.config.nnodes > 1 for cell in cells):
        rows.append(Row("workers", [describe_workers(cell.config) for cell in cells]))
    # Repeats of one configuration differ in their seeds, so these are compared as sets.
    seeds = [sorted({run.config.seed for run in cell.runs}) for cell in cells]
    if any(one != seeds[0] for one in seeds):
        rows.append(Row("seed", [", ".join(map(str, one)) or "-" for one in seeds]))
    return rows


def result_rows(cells: Sequence[RunGroup]) -> list[Row]:
    """What no cell has is left out."""
    rows = [Row(name, [figure(cell) for cell in cells]) for name, figure in FIGURES.items()]
    splits = [run_breakdown(cell) for cell in cells]
    for phase in PHASES:
        shares = [split.share(phase) if split else None for split in splits]
        if any(share and share >= 0.0005 for share in shares):
            rows.append(Row(f"phase {phase}", [formatting.share(share) for share in shares]))
    return [row for row in rows if any(text != "-" for text in row.cells)]


def significance(cells: Sequence[RunGroup]) -> list[Significance]:
    """The first cell against each other one: pace, wall time, loss and accuracy.

    Times only where both train the same model on the same data, and what was learned where they
    have the same data.
    """
    found = []
    for other in cells[1:]:
        pair = cells[0], other
        has_same_data = cells[0].config.data == other.config.data
        if has_same_data and cells[0].config.model == other.config.model:
            found += _pace(*pair)
            found += _measured(*pair, "wall time", _wall)
        if has_same_data:
            found += _measured(*pair, "test loss", _final("test_loss"))
            accuracy = accuracy_increase(*pair)
            if accuracy is not None:
                found.append(Significance("test accuracy", other.label, accuracy))
    # All of them are told together, so they are one family of comparisons.
    corrected = correct([one.difference for one in found])
    return [replace(one, difference=gap) for one, gap in zip(found, corrected, strict=True)]


def _pace(first: RunGroup, other: RunGroup) -> list[Significance]:
    """Of iterations, or of as many samples where batches differ."""
    name, scales = "time per iteration", [1.0, 1.0]
    if first.config.global_batch_size != other.config.global_batch_size:
        name = "time per 1,000 samples"
        scales = [1000 / cell.samples_in_iteration for cell in (first, other)]
    means, blocks = (
        [
            [value * scale for value in values(cell)]
            for cell, scale in zip((first, other), scales, strict=True)
        ]
        for values in (lambda cell: cell.iteration_means, _blocks)
    )
    if not means[0] or not sum(means[1]):
        return []
    return [Significance(name, other.label, relative_increase(*means, *blocks))]


def _measured(
    first: RunGroup, other: RunGroup, name: str, values: Callable[[RunGroup], list[float]]
) -> list[Significance]:
    own, others = values(first), values(other)
    return (
        [Significance(name, other.label, relative_increase(own, others))]
        if own and sum(others)
        else []
    )


def _blocks(cell: RunGroup) -> list[float]:
    timing = cell.timed[0].timing if cell.timed else None
    return timing.blocks if timing else []


def _each(cell: RunGroup, value: Callable[[Run], float | None]) -> list[float]:
    return known(value(run) for run in cell.shown)


def _wall(cell: RunGroup) -> list[float]:
    return _each(cell, lambda run: run.result["wall_seconds"] if run.result else None)


def _final(key: str) -> Callable[[RunGroup], list[float]]:
    return lambda cell: _each(cell, lambda run: run.final(key))


def _nodes(key: str, text: Callable[[float | None], str]) -> Callable[[RunGroup], str]:
    return lambda cell: _mean(_each(cell, lambda run: run.node_sum(key)), text)


def _mean(values: Sequence[float], text: Callable[[float | None], str]) -> str:
    return text(sum(values) / len(values) if values else None)


def _ranks(cell: RunGroup, figure: str) -> str:
    """Over workers and runs."""
    timings = [run.timing for run in cell.shown if run.timing is not None]
    values = [getattr(rank, figure) for timing in timings for rank in timing.ranks]
    return _mean(values, formatting.seconds)


def _sent(cell: RunGroup) -> str:
    """By all workers, in all."""
    values = [
        sum(one.bytes_sent for one in run_traffic(run).values())
        for run in cell.shown
        if len(run.workers) > 1
    ]
    return _mean(values, formatting.size)


def _checkpoints(cell: RunGroup) -> str:
    values = _each(cell, lambda run: run.result["checkpoints"].get("count") if run.result else None)
    return _mean(values, formatting.count) if any(values) else "-"


def _worlds(cell: RunGroup) -> str:
    """Where their number did: times and phases of iterations are since the last change."""
    resized = [run.worlds for run in cell.shown if run.is_resized]
    return world_sizes_text(resized[0]) if resized else "-"


def _weights(cell: RunGroup) -> str:
    hashes = {str(run.result["weights_sha256"] or "-")[:8] for run in cell.runs if run.result}
    return hashes.pop() if len(hashes) == 1 else ("differ" if hashes else "-")


FIGURES: dict[str, Callable[[RunGroup], str]] = {
    "status": lambda cell: cell.status,
    "repeats": lambda cell: "-" if len(cell.runs) < 2 else formatting.count(len(cell.runs)),
    "test accuracy": lambda cell: _mean(_final("test_accuracy")(cell), formatting.number),
    "test loss": lambda cell: _mean(_final("test_loss")(cell), formatting.number),
    "training loss": lambda cell: _mean(_final("train_loss")(cell), formatting.number),
    "wall time": lambda cell: _mean(_wall(cell), formatting.seconds),
    "time to target": lambda cell: _mean(
        _each(cell, lambda run: run.seconds_to_target), formatting.seconds
    ),
    "updates done": lambda cell: _mean(_each(cell, lambda run: run.iterations), formatting.count),
    "workers changed": _worlds,
    "iteration, mean": lambda cell: _mean(
        _each(cell, lambda run: run.iteration_seconds), formatting.seconds
    ),
    "iteration, median": lambda cell: _ranks(cell, "median"),
    "iteration, p95": lambda cell: _ranks(cell, "p95"),
    "traffic sent": _sent,
    "CPU, mean": _nodes("cpu_percent_mean", formatting.percent),
    "memory, mean": _nodes("rss_bytes_mean", formatting.size),
    "memory, peak": _nodes("rss_bytes_peak", formatting.size),
    "checkpoints": _checkpoints,
    "weights": _weights,
}
