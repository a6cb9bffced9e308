"""One run as a report sees it: its settings, its result, and its iterations as they were timed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import RunConfig, from_mapping
from paceline.errors import ConfigError, RecordsError
from paceline.records import Result, RunFolder, read_lines
from paceline.report.buckets import Curve, Floats, shorten
from paceline.report.iteration_phases import in_iterations
from paceline.report.shape import check_result, is_number
from paceline.report.statistics import block_means


@dataclass(frozen=True, slots=True)
class RankTiming:
    """Seconds per iteration of one worker; the first iteration is in `first` alone."""

    rank: int
    count: int
    first: float
    mean: float
    median: float
    p95: float
    total: float
    """Of all iterations, the first one too."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The iterations of a run: exact figures, and curves short enough to draw."""

    ranks: list[RankTiming]
    mean: float
    """Mean over the workers of each one's, the first iteration left out; so are the next two."""
    median: float
    p95: float
    blocks: list[float]
    """Means of long stretches, for the uncertainty of `mean`."""
    seconds: Curve
    """Mean over the workers, against the iteration."""
    loss: Curve
    """Of the first worker that wrote events, against the iteration."""
    loss_by_time: Curve
    """The same against seconds of training."""


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    config: RunConfig
    result: Result | None
    """None while there is no result: the run goes on, or was killed."""

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def status(self) -> str:
        return "unfinished" if self.result is None else str(self.result["status"])

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def cause(self) -> str:
        if self.result is None:
            return "no result.json: it still goes on, or was killed"
        return str(self.result["cause"] or "")

    @property
    def workers(self) -> list[dict[str, Any]]:
        """What each worker reported; empty where none could."""
        return list(self.result["workers"]) if self.result else []

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(self.result["nodes"]) if self.result else []

    @property
    def history(self) -> list[dict[str, Any]]:
        return list(self.result["history"]) if self.result else []

    @property
    def iterations(self) -> int:
        if self.result is not None:
            return int(self.result["iterations"])
        return max((rank.count for rank in self.timing.ranks), default=0) if self.timing else 0

    def final(self, key: str) -> float | None:
        value = self.result["final"].get(key) if self.result else None
        return float(value) if is_number(value) else None

    @property
    def iterations_to_target(self) -> int | None:
        """Up to the first evaluation that reached the target accuracy; None where none did."""
        target = self.config.target_accuracy
        reached = (
            int(entry["iteration"])
            for entry in self.history
            if target is not None
            and is_number(accuracy := entry.get("test_accuracy"))
            and accuracy >= target
        )
        return next(reached, None)

    def node_sum(self, key: str) -> float | None:
        """Over all nodes; None where one of them has no such figure."""
        values = [value for node in self.nodes if is_number(value := node.get(key))]
        return sum(values) if values and len(values) == len(self.nodes) else None

    @property
    def is_in_step(self) -> bool:
        """Whether all workers did the same number of iterations."""
        return self.timing is None or len({rank.count for rank in self.timing.ranks}) == 1

    @cached_property
    def iteration_seconds(self) -> float | None:
        """Mean time of an iteration, the first one left out; None where none was timed.

        Out of step, some workers do more iterations than others: there it is the time in which all
        of them together get through as many samples as an iteration of the run has.
        """
        timing = self.timing
        if timing is None or self.is_in_step:
            return None if timing is None else timing.mean
        samples = {worker["rank"]: worker.get("samples") or 0 for worker in self.workers}
        per_second = math.fsum(
            samples.get(rank.rank, 0) / rank.count / rank.mean for rank in timing.ranks if rank.mean
        )
        total = (self.result or {}).get("samples")
        if not total or not per_second or not self.iterations:
            return timing.mean
        return float(total) / self.iterations / per_second

    @cached_property
    def iteration_phases(self) -> dict[int, dict[str, float]]:
        """Seconds by phase in the iterations of each worker, all together."""
        totals = {rank.rank: rank.total for rank in self.timing.ranks} if self.timing else {}
        return {
            (rank := int(worker["rank"])): in_iterations(
                worker, totals.get(rank, 0.0), self.folder.events_file(rank)
            )
            for worker in self.workers
        }

    @cached_property
    def timing(self) -> Timing | None:
        """None where no iteration was timed."""
        return read_timing(self.folder) or _timing_of_result(self.workers)


def open_run(path: Path) -> Run:
    """A run from its folder; RecordsError says why it cannot be had."""
    folder = RunFolder(path)
    result = folder.read_result()
    if result is None:
        return Run(folder, folder.read_config(), None)
    check_result(result, str(folder.result_file))
    try:
        config = from_mapping(result["config"])
    except ConfigError as error:
        raise RecordsError(f"{folder.result_file}: {error.problems[0]}") from None
    return Run(folder, config, result)


def read_timing(folder: RunFolder) -> Timing | None:
    """From the events of all workers; one worker's at a time, to hold little of a long run."""
    ranks: list[RankTiming] = []
    total = losses = ends = np.zeros(0)
    for rank in _ranks_with_events(folder):
        seconds, own_losses = read_iterations(folder.events_file(rank))
        if not len(seconds):
            continue
        if not ranks:
            total, losses, ends = seconds.copy(), own_losses, np.cumsum(seconds)
        else:
            # Out of step, workers do not all do the same number of iterations.
            shared = min(len(total), len(seconds))
            total = total[:shared] + seconds[:shared]
        ranks.append(_of_rank(rank, seconds))
    if not ranks:
        return None
    mean = total / len(ranks)
    rest = mean[1:] if len(mean) > 1 else mean
    return Timing(
        ranks=ranks,
        **_over_workers(ranks),
        blocks=block_means(rest),
        seconds=shorten(_counting(mean), mean),
        loss=shorten(_counting(losses), losses, use_mean=True),
        loss_by_time=shorten(ends, losses, use_mean=True),
    )


def read_iterations(path: Path) -> tuple[Floats, Floats]:
    """Seconds and losses of a worker's iterations; lines of another shape are passed over.

    Where a run was resumed, iterations that were done again count as they were the last time. A
    loss that was no number is NaN.
    """
    blocks: list[tuple[Floats, Floats]] = []
    done = 0
    for event in read_lines(path):
        if event.get("event") != "iterations":
            continue
        block = _block(event)
        first = event.get("first")
        if block is None or not isinstance(first, int) or not 0 <= first <= done:
            continue
        while blocks and done > first:
            seconds, losses = blocks.pop()
            done -= len(seconds)
            if done < first:
                kept = first - done
                blocks.append((seconds[:kept], losses[:kept]))
                done = first
        blocks.append(block)
        done += len(block[0])
    if not blocks:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([one for one, _ in blocks]), np.concatenate([two for _, two in blocks])


def _block(event: dict[str, Any]) -> tuple[Floats, Floats] | None:
    try:
        seconds = np.array(event["seconds"], dtype=np.float64)
        losses = np.array(event["loss"], dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    fits = seconds.ndim == 1 and seconds.shape == losses.shape and len(seconds) > 0
    return (seconds, losses) if fits and np.isfinite(seconds).all() else None


def _of_rank(rank: int, seconds: Floats) -> RankTiming:
    rest = np.sort(seconds[1:]) if len(seconds) > 1 else seconds
    return RankTiming(
        rank=rank,
        count=len(seconds),
        first=float(seconds[0]),
        mean=float(rest.mean()),
        median=float(rest[(len(rest) - 1) // 2] + rest[len(rest) // 2]) / 2,
        p95=float(rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))]),
        total=float(seconds.sum()),
    )


def _timing_of_result(workers: list[dict[str, Any]]) -> Timing | None:
    """What the result alone tells, where the events are gone."""
    ranks = [
        RankTiming(
            rank=worker["rank"],
            count=0,
            total=0.0,
            **{key: worker["iteration_seconds"][key] for key in ("first", "mean", "median", "p95")},
        )
        for worker in workers
        if is_number(worker["iteration_seconds"].get("mean"))
    ]
    if not ranks:
        return None
    empty = shorten(np.zeros(0), np.zeros(0))
    return Timing(
        ranks=ranks,
        **_over_workers(ranks),
        blocks=[],
        seconds=empty,
        loss=empty,
        loss_by_time=empty,
    )


def _over_workers(ranks: list[RankTiming]) -> dict[str, float]:
    return {
        key: math.fsum(getattr(rank, key) for rank in ranks) / len(ranks)
        for key in ("mean", "median", "p95")
    }


def _ranks_with_events(folder: RunFolder) -> list[int]:
    names = (path.stem.partition("-")[2] for path in folder.path.glob("events-*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def _counting(values: Floats) -> Floats:
    return np.arange(1, len(values) + 1, dtype=np.float64)
