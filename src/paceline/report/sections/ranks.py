"""How the workers of a cell share its work and its time, and in what the first one differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline import formatting
from paceline.analysis.phases import COMPUTE_PHASES, PhaseBreakdown, by_rank, mean_split
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.report.document import Block, BulletList, Table, Text
from paceline.report.sections.outline import SectionContext, known
from paceline.report.sections.phases import spent

TITLE = "Time and work of each worker"
MOST_ROWS = 80
TELLING = 0.05
"""A share of an iteration from which on a difference between workers is told."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Mean seconds per iteration of the workers of a cell, over its finished runs."""

    label: str
    by_rank: dict[int, list[float]]

    @property
    def rank_0(self) -> list[float]:
        return self.by_rank.get(0, [])

    @property
    def others(self) -> list[float]:
        return [mean for rank, means in self.by_rank.items() if rank for mean in means]


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of a run."""

    rank: int
    node: int
    mean_seconds: float
    """Of an iteration, the first one left out."""
    split: PhaseBreakdown
    """Of an iteration, the first one left out."""
    training_seconds: float
    """All iterations."""
    samples: int
    moved_bytes: float | None
    """Sent and received in an iteration; None where the number of workers has changed."""


def workers_of(cell: RunGroup) -> list[Worker]:
    """By rank, on average over the finished runs."""
    by_rank: dict[int, list[Worker]] = {}
    for run in cell.timed:
        for worker in workers(run):
            by_rank.setdefault(worker.rank, []).append(worker)
    return [_mean_worker(own) for _, own in sorted(by_rank.items())]


def _mean_worker(own: Sequence[Worker]) -> Worker:
    """Of one rank in several runs."""
    moved = known(worker.moved_bytes for worker in own)
    return Worker(
        own[0].rank,
        own[0].node,
        fmean(worker.mean_seconds for worker in own),
        mean_split([worker.split for worker in own]),
        fmean(worker.training_seconds for worker in own),
        round(fmean(worker.samples for worker in own)),
        fmean(moved) if len(moved) == len(own) else None,
    )


def rank_times(cell: RunGroup) -> RankTimes:
    by_rank: dict[int, list[float]] = {}
    for run in cell.timed:
        for rank in run.timing.ranks if run.timing is not None else ():
            by_rank.setdefault(rank.rank, []).append(rank.mean)
    return RankTimes(cell.label, by_rank)


def workers(run: Run) -> list[Worker]:
    """By rank; none where their iterations were not timed."""
    timings = {rank.rank: rank for rank in run.timing.ranks} if run.timing else {}
    splits = by_rank(run)
    return [
        Worker(
            rank,
            int(worker["node"]),
            timing.mean,
            splits[rank],
            timing.total or timing.mean * run.iterations,
            int(worker.get("samples") or 0),
            None if run.is_resized else _moved(worker) / (timing.count or run.iterations),
        )
        for worker in sorted(run.workers, key=lambda one: int(one["rank"]))
        if (rank := int(worker["rank"])) in splits and (timing := timings.get(rank)) is not None
    ]


def _moved(worker: dict[str, dict[str, dict[str, float]]]) -> float:
    return math.fsum(
        count.get("bytes_sent", 0) + count.get("bytes_received", 0)
        for count in worker.get("traffic", {}).values()
    )


def balance(found: Sequence[Worker]) -> float:
    """Mean time spent computing over the longest: 1 where nobody computes longer than another."""
    times = [worker.split.of(COMPUTE_PHASES) for worker in found]
    return math.fsum(times) / len(times) / max(times) if max(times) else 1.0


def balances(cell: RunGroup) -> list[float]:
    """Of each finished run: the slowest worker may be another one each time."""
    return [balance(own) for run in cell.timed if len(own := workers(run)) > 1]


def first_against_others(found: Sequence[Worker]) -> tuple[dict[str, float], float, float]:
    """By phase how much longer rank 0 takes than the mean of the others; bytes of each."""
    first, others = found[0], found[1:]
    more = {
        phase: seconds - math.fsum(worker.split.seconds[phase] for worker in others) / len(others)
        for phase, seconds in first.split.seconds.items()
    }
    by_others = math.fsum(worker.moved_bytes or 0.0 for worker in others) / len(others)
    return more, first.moved_bytes or 0.0, by_others


def build(outline: SectionContext) -> list[Block]:
    found = [(cell, workers_of(cell)) for cell in outline.cells if cell.timed]
    several = [(cell, own) for cell, own in found if len(own) > 1]
    if not several:
        return []
    rows = [
        (
            cell.label,
            formatting.spread((times := rank_times(cell)).rank_0, formatting.seconds),
            formatting.spread(times.others, formatting.seconds),
            formatting.spread(balances(cell), formatting.share) if len(own) > 1 else "-",
        )
        for cell, own in found
        if own
    ]
    columns = ("configuration, time per iteration", "rank 0", "other ranks", "compute balance")
    each = [row for cell, own in several for row in _worker_rows(cell, own)]
    blocks: list[Block] = [
        Table(columns, rows),
        BulletList(list(_reasons(several))),
        Table(_COLUMNS, each[:MOST_ROWS]),
    ]
    if len(each) > MOST_ROWS:
        blocks.append(Text(f"The first {MOST_ROWS} of {len(each):,} workers.", "note"))
    blocks.append(
        Text(
            "Compute, communication and waiting are parts of the time per iteration. Balance: mean"
            " compute time over that of the worker that computes longest. Values are means over the"
            " finished repeats.",
            "note",
        )
    )
    return blocks


_COLUMNS = (
    "configuration, worker", "time per iteration", "compute", "communication", "waiting",
    "training time", "samples", "of all", "sent and received per iteration",
)  # fmt: skip


def _worker_rows(cell: RunGroup, found: Sequence[Worker]) -> Iterator[tuple[str, ...]]:
    samples = sum(worker.samples for worker in found)
    for worker in found:
        place = f", node {worker.node}" if cell.config.nnodes > 1 else ""
        yield (
            f"{cell.label}: rank {worker.rank}{place}",
            formatting.seconds(worker.mean_seconds),
            *spent(worker.split),
            formatting.seconds(worker.training_seconds),
            formatting.count(worker.samples),
            formatting.share(worker.samples / samples if samples else None),
            formatting.size(worker.moved_bytes),
        )


def _reasons(several: Sequence[tuple[RunGroup, list[Worker]]]) -> Iterator[tuple[str, str]]:
    """In what rank 0 differs, cell by cell; those in which it does not are named together.

    Where it was not timed, there is nothing to say.
    """
    alike = []
    for cell, found in several:
        if found[0].rank:
            continue
        text = _reason(found)
        if text:
            yield f"{cell.label}:", text
        else:
            alike.append(cell.label)
    if alike:
        yield (
            "Rank 0 is like the others,",
            f"no phase by more than {formatting.share(TELLING)} of an iteration apart, in"
            f" {'; '.join(alike)}.",
        )


def _reason(found: Sequence[Worker]) -> str:
    more, moved, by_others = first_against_others(found)
    whole = math.fsum(worker.split.total for worker in found) / len(found)
    told = [
        f"{formatting.seconds(abs(seconds))} {'longer' if seconds > 0 else 'shorter'} in {phase}"
        for phase, seconds in sorted(more.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) > TELLING * whole
    ][:3]
    if max(moved, by_others) > (1 + TELLING) * min(moved, by_others):
        sizes = f"{formatting.size(moved)}, each of the others {formatting.size(by_others)}"
        if not told:
            return (
                f"rank 0 sends and receives {sizes} an iteration; as the others wait for the same"
                f" transfers, no phase of theirs is over {formatting.share(TELLING)} of an"
                " iteration longer or shorter."
            )
        told.append(f"and sends and receives {sizes}")
    if not told:
        return ""
    return f"of an iteration of {formatting.seconds(whole)} rank 0 is {', '.join(told)}."
