"""Where the time of an iteration or an epoch goes, and what makes one configuration slower.

The phases of an iteration exclude the first one, as the step time does. Results of older versions
have no such figures: their phases are those of the iterations after the first block of events.
Where that block holds more than half of a run, the first iteration is included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.analysis.communication import (
    CommMeasurement,
    link_bytes_per_second,
    measured_bandwidth_limit,
)
from paceline.analysis.events import IN_ITERATION, Later
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, scales_to_samples
from paceline.analysis.step_times import RankStepTimes
from paceline.analysis.validation import is_number
from paceline.measure.startup import BEFORE_CLOCK, SCRIPT_PARTS, STARTUP_PARTS
from paceline.records import PHASES

COMPUTE_PHASES = ("input", "forward", "backward", "update")
MAX_OUTSIDE_SHARE = 0.002
"""Time outside iterations is subtracted if it exceeds this share of their time."""
STARTUP = "start-up"
"""What precedes the first iteration: the records count it as `other`."""
OUTSIDE = ("evaluate", "checkpoint", STARTUP, "other")
WALL_PHASES = (*IN_ITERATION, *OUTSIDE)
"""All phases of a run, with the start-up."""
BOTTLENECK_SHARE = 0.5
"""A phase with at least this share of an iteration is its bottleneck."""
MINOR_SHARE = 0.25
"""With at most this share of exposed communication and waiting, compute or other code is the
bottleneck."""
EXPLAINED = 0.5
"""The link explains communication if it takes at least this share of the exposed time."""
TOLERANCE = 0.05
"""Phases in events must sum to the time of their iterations within this share."""


@dataclass(frozen=True, slots=True)
class PhaseBreakdown:
    """Seconds by phase, of one worker or the mean over several."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.seconds.values())

    def share(self, phase: str) -> float:
        return self.seconds.get(phase, 0.0) / self.total if self.total else 0.0

    def of(self, phases: Sequence[str]) -> float:
        return math.fsum(self.seconds[phase] for phase in phases)

    @property
    def compute_share(self) -> float | None:
        return self.of(COMPUTE_PHASES) / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class Explanation:
    """How much longer the same work takes in `slower` than in `faster`, by phase."""

    faster: str
    slower: str
    work: str
    """An iteration; 1,000 samples where the batches differ."""
    seconds: float
    """The difference as the iterations were timed."""
    by_phase: dict[str, float]

    @property
    def explained(self) -> float:
        return math.fsum(self.by_phase.values())

    @property
    def explained_share(self) -> float | None:
        """The part that the phases add up to; None for a difference close to zero."""
        is_meaningful = abs(self.seconds) > 0.05 * sum(map(abs, self.by_phase.values()))
        return self.explained / self.seconds if is_meaningful else None

    @property
    def largest(self) -> str:
        """The phase that differs most in the direction of the difference."""
        sign = 1 if self.seconds >= 0 else -1
        return max(self.by_phase, key=lambda phase: sign * self.by_phase[phase])


def worker_breakdown(worker: dict[str, Any]) -> PhaseBreakdown:
    """The wall time of a worker, in WALL_PHASES."""
    spent = {STARTUP: 0.0, **{phase: float(worker["phases"][phase]) for phase in PHASES}}
    parts = _startup_of(worker) or {}
    startup = math.fsum(parts[part] for part in parts if part not in BEFORE_CLOCK)
    spent[STARTUP] = min(startup, spent["other"])
    spent["other"] -= spent[STARTUP]
    return PhaseBreakdown({phase: spent[phase] for phase in WALL_PHASES})


def run_iteration_breakdown(run: Run) -> PhaseBreakdown | None:
    """One iteration, mean over the workers of the run; None if unknown."""
    splits = breakdown_by_rank(run)
    return mean_split(list(splits.values())) if splits else None


@dataclass(frozen=True, slots=True)
class RankSplit:
    """One iteration of a worker."""

    split: PhaseBreakdown
    seconds: float | None
    """Mean time of the same iterations; None if they were not timed."""
    has_first: bool
    """Whether the first iteration is included, because the records do not separate it."""


def breakdown_by_rank(run: Run) -> dict[int, PhaseBreakdown]:
    """One iteration of each worker."""
    return {rank: one.split for rank, one in rank_splits(run).items()}


def rank_splits(run: Run) -> dict[int, RankSplit]:
    """One iteration of each worker, with its timed duration."""
    timings = {rank.rank: rank for rank in run.timing.ranks} if run.timing else {}
    found = ((int(worker["rank"]), worker) for worker in run.workers)
    splits = ((rank, _rank_split(run, worker, timings.get(rank))) for rank, worker in found)
    return {rank: split for rank, split in splits if split is not None}


def has_first(group: RunGroup) -> bool:
    """Whether phases of a finished run include its first iteration."""
    return any(one.has_first for run in group.measured for one in rank_splits(run).values())


def _rank_split(run: Run, worker: dict[str, Any], timing: RankStepTimes | None) -> RankSplit | None:
    """None where the phases are not known."""
    recorded = worker.get("after_first")
    if recorded is not None and recorded["iterations"]:
        seconds = timing.mean if timing else worker["iteration_seconds"].get("mean")
        phases = {phase: float(recorded["phases"][phase]) for phase in IN_ITERATION}
        if run.settings.kind != "train" and seconds is not None:
            # A user's loop may do anything in its steps, such as making batches itself.
            rest = seconds * recorded["iterations"] - math.fsum(phases.values())
            phases["other"] = max(0.0, rest)
        return _over(phases, recorded["iterations"], seconds, has_first=False)
    whole = {phase: float(worker["phases"][phase]) for phase in IN_ITERATION}
    later = timing.later if timing else None
    if timing and later and 2 * later.count >= timing.count and _agree(later):
        phases = _with_waits(later.phases, whole)
        return _over(phases, later.count, later.seconds / later.count, has_first=False)
    phases, count = _with_first(run, whole, timing)
    seconds = timing.total / timing.count if timing and timing.count else None
    return _over(phases, count, seconds, has_first=True) if count else None


def _over(
    phases: dict[str, float], count: int, seconds: float | None, *, has_first: bool
) -> RankSplit:
    split = PhaseBreakdown({phase: spent / count for phase, spent in phases.items()})
    return RankSplit(split, seconds, has_first)


def _agree(later: Later) -> bool:
    written = math.fsum(later.phases.values())
    return abs(written - later.seconds) <= TOLERANCE * later.seconds


def _with_waits(phases: dict[str, float], whole: dict[str, float]) -> dict[str, float]:
    """Events do not separate waiting from exchange: apply the share of the whole run."""
    both = whole["exchange"] + whole["wait"]
    exchange = phases["exchange"] + phases["wait"]
    waiting = exchange * whole["wait"] / both if both else 0.0
    return {**phases, "exchange": exchange - waiting, "wait": waiting}


def _with_first(
    run: Run, whole: dict[str, float], timing: RankStepTimes | None
) -> tuple[dict[str, float], int]:
    """The phases of a worker in all its iterations, and their number; 0 if unknown."""
    if timing is None or not timing.count or timing.phases is None:
        count = (timing.count if timing else 0) or run.iterations
        return whole, 0 if run.is_resized else count
    spent, written = math.fsum(whole.values()), math.fsum(timing.phases.values())
    outside = spent - timing.total
    is_near = outside <= MAX_OUTSIDE_SHARE * timing.total or abs(written - timing.total) > outside
    if is_near and not run.is_resized:
        return whole, timing.count
    return _with_waits(timing.phases, whole), timing.count


def run_overlapped_seconds(run: Run) -> float | None:
    """Overlapped communication of an iteration, mean over the workers; None if not measured.

    A single worker has none, whatever its strategy.
    """
    if len(run.workers) < 2:
        return 0.0
    timings = {rank.rank: rank for rank in run.timing.ranks} if run.timing else {}
    values = [
        _rank_overlapped_seconds(run, worker, timings.get(int(worker["rank"])))
        for worker in run.workers
    ]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def overlapped_seconds(group: RunGroup) -> float | None:
    """Mean over the measured runs; None if one of them did not measure it."""
    values = [run_overlapped_seconds(run) for run in group.measured]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def has_single_bucket(group: RunGroup) -> bool:
    """Whether DDP or overlap sends all gradients in one bucket, so that nothing can overlap."""
    if group.settings.strategy not in ("ddp", "overlap") or group.workers == 1:
        return False
    # Both count the messages of a ring, whatever the library does.
    messages = 2 * (group.workers - 1)
    sent = [
        worker["traffic"]["gradients"]["messages"] / run.iterations
        for run in group.finished
        for worker in run.workers
        if run.iterations
    ]
    return bool(sent) and max(sent) <= messages


def overlapped_share(overlapped_seconds: float, breakdown: PhaseBreakdown) -> float:
    """Overlapped communication as a share of all communication of an iteration."""
    communication = overlapped_seconds + breakdown.seconds["exchange"]
    return overlapped_seconds / communication if communication else 0.0


def _rank_overlapped_seconds(
    run: Run, worker: dict[str, Any], timing: RankStepTimes | None
) -> float | None:
    recorded = worker.get("after_first")
    if recorded is not None and recorded["iterations"]:
        later = recorded.get("hidden_exchange_seconds")
        return None if later is None else float(later) / int(recorded["iterations"])
    hidden = worker.get("hidden_exchange_seconds")
    count = (timing.count if timing else 0) or run.iterations
    if hidden is None or not count or run.is_resized:
        return None
    return float(hidden) / count


def iteration_breakdown(group: RunGroup) -> PhaseBreakdown | None:
    """One iteration, mean over the measured runs."""
    splits = [
        split for run in group.measured if (split := run_iteration_breakdown(run)) is not None
    ]
    return mean_split(splits) if splits else None


def run_breakdown(group: RunGroup) -> PhaseBreakdown | None:
    """The wall time of a worker, mean over workers and measured runs."""
    splits = [worker_breakdown(worker) for run in group.measured for worker in run.workers]
    return mean_split(splits) if splits else None


def explain(faster: RunGroup, slower: RunGroup, *, by_samples: bool = False) -> Explanation | None:
    """The difference of two groups by phase, per 1,000 samples if asked or if batches differ.

    None without phases, and for asynchronous runs: their workers do unequal numbers of iterations,
    so a mean over workers does not explain the step time.
    """
    if not all(run.is_synchronous for group in (faster, slower) for run in group.timed):
        return None
    splits = iteration_breakdown(faster), iteration_breakdown(slower)
    seconds = _iteration_seconds(faster), _iteration_seconds(slower)
    if splits[0] is None or splits[1] is None or seconds[0] is None or seconds[1] is None:
        return None
    groups = faster, slower
    scales, work = [1.0, 1.0], "per iteration"
    to_samples = scales_to_samples(groups, always=by_samples)
    if to_samples is not None:
        scales, work = to_samples, "per 1,000 samples"
    first, second = splits[0].seconds, splits[1].seconds
    return Explanation(
        faster.label,
        slower.label,
        work,
        seconds[1] * scales[1] - seconds[0] * scales[0],
        {
            phase: second[phase] * scales[1] - spent * scales[0]
            for phase, spent in first.items()
            if phase in second
        },
    )


def _iteration_seconds(group: RunGroup) -> float | None:
    """Mean over runs and workers of the iterations that the phases cover."""
    means = []
    for run in group.timed:
        seconds = [one.seconds for one in rank_splits(run).values()]
        known = [value for value in seconds if value is not None]
        if known and len(known) == len(seconds):
            means.append(math.fsum(known) / len(known))
    return math.fsum(means) / len(means) if means else None


def mean_split(splits: Sequence[PhaseBreakdown]) -> PhaseBreakdown:
    """The mean of each phase."""
    return PhaseBreakdown(
        {
            phase: math.fsum(split.seconds.get(phase, 0.0) for split in splits) / len(splits)
            for phase in splits[0].seconds
        }
    )


@dataclass(frozen=True, slots=True)
class WireTime:
    """An upper bound on the time that the bytes of an iteration take on the link."""

    bytes: float
    """Over the busiest link."""
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CommunicationCause:
    """Why communication takes longer than the link needs, as far as the records show."""

    cpu_quota: float | None = None
    """Cores per node: processes wait to be scheduled."""
    threads: int | None = None
    """Of all workers, where they are more than `cores`."""
    cores: float | None = None


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limits the step time: compute, communication, waiting or input.

    Exposed communication alone does not show that the network is slow: on busy cores a message
    waits for a process to run. A measured link bounds the time that the bytes of an iteration take
    on it; the rest has another cause.
    """

    label: str
    kind: str
    main_share: str
    """The key of `shares` that shows the bottleneck."""
    shares: dict[str, float]
    """Of an iteration: compute (with input), communication, waiting, input, other."""
    split: PhaseBreakdown
    """One iteration."""
    exchange_seconds: float = 0.0
    """Exposed communication of an iteration."""
    wire: WireTime | None = None
    """None where no link was measured."""
    cause: CommunicationCause | None = None
    """None where the link explains the communication, or no link was measured."""


def find_bottleneck(group: RunGroup, measured: Sequence[CommMeasurement] = ()) -> Bottleneck | None:
    """None without phases; `measured` are the results of `paceline comm`."""
    split = iteration_breakdown(group)
    if split is None or not split.total:
        return None
    shares = {
        "compute": split.of(COMPUTE_PHASES) / split.total,
        "communication": split.share("exchange"),
        "waiting": split.share("wait"),
        "input": split.share("input"),
        "other": split.share("other"),
    }
    exchange = split.seconds["exchange"]
    wire = wire_time(group, measured)
    is_explained = wire is None or wire.seconds >= EXPLAINED * exchange
    is_network = group.settings.nnodes > 1 and is_explained

    def communication(kind: str) -> Bottleneck:
        cause = None if is_explained else _remaining_cause(group)
        return Bottleneck(group.label, kind, "communication", shares, split, exchange, wire, cause)

    if shares["other"] >= BOTTLENECK_SHARE:
        return Bottleneck(group.label, "bound by other code", "other", shares, split)
    if shares["input"] >= BOTTLENECK_SHARE:
        return Bottleneck(group.label, "input-bound", "input", shares, split)
    if shares["communication"] >= BOTTLENECK_SHARE or (
        shares["communication"] > shares["compute"] and shares["communication"] > shares["waiting"]
    ):
        return communication("network-bound" if is_network else "communication-bound")
    if shares["waiting"] >= MINOR_SHARE and shares["waiting"] > shares["communication"]:
        return Bottleneck(group.label, "wait-bound", "waiting", shares, split)
    if 1 - shares["compute"] - shares["other"] <= MINOR_SHARE:
        if shares["other"] > shares["compute"]:
            return Bottleneck(group.label, "bound by other code", "other", shares, split)
        return Bottleneck(group.label, "compute-bound", "compute", shares, split)
    if shares["waiting"] > shares["communication"]:
        return Bottleneck(group.label, "compute and waiting", "waiting", shares, split)
    return communication("compute and network" if is_network else "compute and communication")


def wire_time(group: RunGroup, measured: Sequence[CommMeasurement] = ()) -> WireTime | None:
    """From the first finished run; None if nothing was sent or no link was measured."""
    run = group.finished[0]
    rate = link_bytes_per_second(run) or measured_bandwidth_limit(measured, group.workers)
    if not rate or not run.iterations or run.is_resized:
        return None
    by_node: dict[int, float] = {}
    messages = 0.0
    for worker in run.workers:
        kinds = worker.get("traffic", {}).values()
        sent = sum(kind.get("bytes_sent") or 0 for kind in kinds)
        received = sum(kind.get("bytes_received") or 0 for kind in kinds)
        # A node's workers share its link, and the link of a server carries what all of them send.
        node = 0 if group.settings.strategy == "parameter_server" else int(worker["node"])
        by_node[node] = by_node.get(node, 0.0) + max(sent, received)
        messages = max(messages, sum(kind.get("messages") or 0 for kind in kinds))
    count = max(by_node.values(), default=0.0) / run.iterations
    if not count:
        return None
    latency = messages / run.iterations * _round_trip_seconds(run)
    return WireTime(count, rate, count / rate + latency)


def _round_trip_seconds(run: Run) -> float:
    """As measured in the emulated cluster of the run; 0 without one."""
    cluster = (run.result or {}).get("cluster")
    found = cluster.get("got") if isinstance(cluster, dict) else None
    times = [
        item["got"]
        for item in found or ()
        if isinstance(item, dict) and item.get("what") == "round trip" and is_number(item["got"])
    ]
    return float(max(times, default=0.0))


def _remaining_cause(group: RunGroup) -> CommunicationCause:
    run = group.finished[0]
    hardware = (run.result or {}).get("hardware", {})
    quota, cores = hardware.get("cpu_quota"), hardware.get("cores_in_machine")
    if is_number(quota):
        return CommunicationCause(cpu_quota=quota)
    is_one_machine = group.settings.nnodes == 1 or group.settings.cluster
    threads = group.workers * (group.settings.threads or 1)
    if is_one_machine and is_number(cores) and threads > cores:
        return CommunicationCause(threads=threads, cores=cores)
    return CommunicationCause()


def iterations_in_epoch(run: Run) -> float | None:
    """From the evaluations; None if there are none."""
    entries = [entry for entry in run.history if entry["epoch"] > 0 and entry["iteration"] > 0]
    if not entries:
        return None
    return float(entries[-1]["iteration"] / entries[-1]["epoch"])


def epoch_seconds(run: Run) -> float | None:
    """The mean step time over an epoch; the first iteration of the run is excluded."""
    count, seconds = iterations_in_epoch(run), run.iteration_seconds
    return None if count is None or seconds is None else seconds * count


def first_epoch_seconds(run: Run) -> float | None:
    """Training time up to the end of the first epoch; None if that was not evaluated."""
    return next((float(one["seconds"]) for one in run.history if one["epoch"] == 1), None)


def exchange_seconds_in_epoch(run: Run) -> float | None:
    """Exposed communication, mean over the workers."""
    if not run.is_synchronous:
        # Workers do unequal numbers of iterations: only their sums are those of the run.
        return _in_epoch(run, [worker["phases"]["exchange"] for worker in run.workers])
    count, split = iterations_in_epoch(run), run_iteration_breakdown(run)
    return None if count is None or split is None else split.seconds["exchange"] * count


def overlapped_seconds_in_epoch(run: Run) -> float | None:
    """Overlapped communication, mean over the workers; None if not measured."""
    if not run.is_synchronous:
        hidden = [worker.get("hidden_exchange_seconds") for worker in run.workers]
        measured = [seconds for seconds in hidden if seconds is not None]
        return _in_epoch(run, measured) if len(measured) == len(hidden) else None
    count, seconds = iterations_in_epoch(run), run_overlapped_seconds(run)
    return None if count is None or seconds is None else seconds * count


def _in_epoch(run: Run, spent: Sequence[float]) -> float | None:
    """The mean over workers of their time in the whole run, scaled to one epoch."""
    count = iterations_in_epoch(run)
    if count is None or not spent or not run.iterations or run.is_resized:
        return None
    return float(sum(spent) / len(spent) / run.iterations * count)


def rank_breakdowns(group: RunGroup) -> dict[int, PhaseBreakdown]:
    """One iteration of each rank, mean over the measured runs."""
    each: dict[int, list[PhaseBreakdown]] = {}
    for run in group.measured:
        for rank, split in breakdown_by_rank(run).items():
            each.setdefault(rank, []).append(split)
    return {rank: mean_split(splits) for rank, splits in sorted(each.items())}


_LATER_PARTS = {"launch": 0.0, "device": 0.0, "precision": 0.0}
"""Parts of the startup that older records do not have."""


def _startup_of(worker: dict[str, Any]) -> dict[str, float] | None:
    """The parts of a worker's startup; None if they were not recorded."""
    recorded = worker.get("startup_seconds")
    if not isinstance(recorded, dict):
        return None
    for parts, later in ((SCRIPT_PARTS, {}), (STARTUP_PARTS, _LATER_PARTS)):
        known = {**later, **recorded}
        if all(is_number(known.get(part)) for part in parts):
            return {part: float(known[part]) for part in parts}
    return None


def startup_seconds(group: RunGroup) -> dict[str, float] | None:
    """By part, the mean over the workers of all finished runs; None if older records lack it."""
    workers = (worker for run in group.measured for worker in run.workers)
    found = [parts for worker in workers if (parts := _startup_of(worker)) is not None]
    if not found:
        return None
    return {part: fmean(parts[part] for parts in found) for part in found[0]}
