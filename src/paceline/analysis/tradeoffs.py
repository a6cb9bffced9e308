"""What a setting costs and brings: batch sizes compared, checkpoints against none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.phases import epoch_seconds, first_epoch_seconds
from paceline.analysis.run_group import IGNORED_FIELDS, RunGroup, differing, known
from paceline.analysis.statistics import Difference, correct, relative_increase

BATCH_FIELDS = frozenset(
    ("batch_size", "batch_per_worker", "iterations", "epochs", "eval_every", "checkpoint_every")
)
"""Settings that follow from the batch size if the number of samples stays the same."""

_CHECKPOINT_FIELDS = IGNORED_FIELDS | {"checkpoint_every", "checkpoint_keep", "checkpoint_mode"}


@dataclass(frozen=True, slots=True)
class BatchSizeSummary:
    """Values of each finished run of a group."""

    group: RunGroup
    batch_size: int
    wall_seconds: list[float]
    iteration_seconds: list[float]
    epoch_seconds: list[float]
    first_epoch_seconds: list[float]
    test_loss: list[float]
    test_accuracy: list[float]
    peak_memory_bytes: list[float]
    cpu_percent: list[float]


def summarize_batch_sizes(groups: Sequence[RunGroup]) -> list[BatchSizeSummary]:
    """By batch size; empty with fewer than two sizes."""
    rows = [
        _summarize_batch_size(group, group.batch_size)
        for group in groups
        if group.finished and group.batch_size is not None
    ]
    if len({row.batch_size for row in rows}) < 2:
        return []
    return sorted(rows, key=lambda row: row.batch_size)


def _summarize_batch_size(group: RunGroup, batch_size: int) -> BatchSizeSummary:
    return BatchSizeSummary(
        group,
        batch_size,
        group.values(lambda run: run.wall_seconds),
        group.iteration_means,
        group.values(epoch_seconds),
        group.values(first_epoch_seconds),
        group.finals("test_loss"),
        group.finals("test_accuracy"),
        group.values(lambda run: run.node_sum("rss_bytes_peak")),
        group.values(lambda run: run.node_sum("cpu_percent_mean")),
    )


def compare_batch_sizes(
    small: BatchSizeSummary, large: BatchSizeSummary
) -> list[tuple[str, Difference]]:
    """Relative change of wall time, epoch time, CPU and memory, corrected as one family."""
    compared = [
        (name, relative_increase(after, before))
        for name, before, after in (
            ("wall time", small.wall_seconds, large.wall_seconds),
            ("time per epoch", small.epoch_seconds, large.epoch_seconds),
            ("CPU", small.cpu_percent, large.cpu_percent),
            ("peak memory", small.peak_memory_bytes, large.peak_memory_bytes),
        )
        if before and after and sum(before)
    ]
    gaps = correct([gap for _, gap in compared])
    return [(name, gap) for (name, _), gap in zip(compared, gaps, strict=True)]


def differ_in_batch_size_only(small: BatchSizeSummary, large: BatchSizeSummary) -> bool:
    return not set(differing([small.group.settings, large.group.settings])) - BATCH_FIELDS


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    label: str
    counts: list[float]
    sizes_bytes: list[float]
    blocked_seconds: list[float]
    """Time that training waited for checkpoints, in each run."""
    wall_seconds: list[float]
    memory_bytes: list[float]
    """Mean over the run, summed over nodes."""
    baseline: str | None = None
    """Label of the group that differs only in not writing checkpoints."""
    longer: Difference | None = None
    """Wall time against the baseline."""
    more_memory: Difference | None = None
    """Memory against the baseline, in bytes."""

    @property
    def mean_blocked_seconds(self) -> float:
        return sum(self.blocked_seconds) / len(self.wall_seconds)

    @property
    def blocked_share(self) -> float | None:
        """Of the wall time."""
        wall = sum(self.wall_seconds)
        return sum(self.blocked_seconds) / wall if wall else None


def checkpoint_costs(groups: Sequence[RunGroup]) -> list[CheckpointCost]:
    """Groups with checkpoints, each compared with its baseline where there is one."""
    plain = {
        group.settings.key(_CHECKPOINT_FIELDS): group
        for group in groups
        if group.finished and not _checkpoint_values(group, "count")
    }
    costs = [
        _cost(group, plain.get(group.settings.key(_CHECKPOINT_FIELDS)))
        for group in groups
        if group.finished and _checkpoint_values(group, "count")
    ]
    # The report shows time and memory of all groups together: one family of comparisons.
    gaps = [gap for cost in costs for gap in (cost.longer, cost.more_memory) if gap is not None]
    corrected = iter(correct(gaps))
    return [
        dataclasses.replace(
            cost,
            longer=next(corrected) if cost.longer is not None else None,
            more_memory=next(corrected) if cost.more_memory is not None else None,
        )
        for cost in costs
    ]


def baseline_cost(group: RunGroup) -> CheckpointCost:
    """The row of a group without checkpoints."""
    return CheckpointCost(group.label, [], [], [], _wall_seconds(group), _memory(group))


def _cost(group: RunGroup, baseline: RunGroup | None) -> CheckpointCost:
    walls, memory = _wall_seconds(group), _memory(group)
    cost = CheckpointCost(
        group.label,
        _checkpoint_values(group, "count"),
        _checkpoint_values(group, "bytes"),
        _checkpoint_values(group, "blocked_seconds"),
        walls,
        memory,
    )
    if baseline is None:
        return cost
    before = _memory(baseline)
    return dataclasses.replace(
        cost,
        baseline=baseline.label,
        longer=relative_increase(walls, _wall_seconds(baseline)),
        more_memory=relative_increase(memory, before) if memory and before else None,
    )


def _checkpoint_values(group: RunGroup, key: str) -> list[float]:
    values = known(run.result["checkpoints"].get(key) for run in group.finished if run.result)
    return values if any(values) else []


def _wall_seconds(group: RunGroup) -> list[float]:
    return group.values(lambda run: run.wall_seconds)


def _memory(group: RunGroup) -> list[float]:
    return group.values(lambda run: run.node_sum("rss_bytes_mean"))
