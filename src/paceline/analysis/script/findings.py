"""What slows down a profiled script, with the figure that shows it and the line to change.

Findings are data; report/scripts.py phrases them. The most expensive comes first. A rule
that has no evidence in the records finds nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.analysis.contention import MIN_CONTENTION_SHARE, other_processes_share
from paceline.analysis.phases import Bottleneck, find_bottleneck, run_iteration_breakdown
from paceline.analysis.ranks import WAIT_SHARE
from paceline.analysis.recommendations import (
    COSTLY_CHECKPOINTS,
    COSTLY_INPUT,
)
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.script.profile import (
    Call,
    DdpModel,
    Line,
    RankFacts,
    ScriptProfile,
    cores_of,
    read_script_profile,
)
from paceline.analysis.script.slow_rank import SlowRank, WaitsForCore, find_slow_rank

STEPS_MIN = 20
"""Fewer steps do not show what is usual for a script."""
EVERY_STEP = 0.9
"""A call is made in every step if this share of the steps has it; evaluation has none."""
COSTLY_CALL = 0.02
"""Share of the step time: less than run-to-run variation is not worth a change."""
METRIC_BYTES = 4096
"""An all-reduce of at most this size carries metrics, not gradients: only its latency counts."""
QUEUE_SHARE = 0.1
"""Share of the CPU time that threads ask for and do not get. A quiet machine has 1–3%."""
BUCKET_BYTES = 1 << 20
"""The size of DDP's first bucket. Smaller all-reduces cost latency rather than bandwidth."""
BUCKETS_MIN = 8
"""With fewer all-reduces per step, their latency does not add up."""
COSTLY_WAIT = 0.2
"""Share of the step time, mean over the ranks: batches of random length vary by less."""
HANDOVER_SECONDS = 2e-3
"""A worker process of a DataLoader takes about half of this to hand over a batch."""
GROWTH_SHARE = 0.05
"""Memory growth in the second half of a run, as a share of the memory: caches fill earlier."""
GROWTH_BYTES = 64 << 20
GROWTH_SAMPLES = 8
"""In the second half: growth must show in each quarter of it."""


@dataclass(frozen=True, slots=True)
class NoLoaderWorkers:
    """Batches are made in the training process: a DataLoader without workers."""

    share: float
    line: Line | None
    seconds: float
    """Per step."""
    spare_cores: int
    """Cores that no rank uses."""


@dataclass(frozen=True, slots=True)
class SlowInput:
    """Steps wait for batches in spite of the workers of the DataLoader."""

    share: float
    line: Line | None
    seconds: float
    workers: int
    spare_cores: int
    """Cores that no rank and no worker of a DataLoader uses."""


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """The script reads a tensor back, or synchronizes, in every step."""

    share: float
    call: str
    line: Line
    seconds: float
    per_step: float
    is_costly: bool
    """If not, it is a note: it costs nothing here, but would on a GPU."""


@dataclass(frozen=True, slots=True)
class BlockingCopy:
    """Batches are copied to the GPU in a way that the script waits for."""

    share: float
    line: Line
    seconds: float
    """Per step."""
    bytes: float
    """Per step."""
    is_pageable: bool
    """If not, the copy is not `non_blocking`."""


@dataclass(frozen=True, slots=True)
class TooManyThreads:
    share: float
    """Of the CPU time that the threads ask for and do not get."""
    host: str
    ranks: int
    threads: int
    """Per rank."""
    cores: int
    is_default: bool
    """Whether OMP_NUM_THREADS is not set."""


@dataclass(frozen=True, slots=True)
class SmallBuckets:
    share: float
    """Exposed communication."""
    line: Line | None
    per_step: float
    mean_bytes: float
    is_ddp: bool


@dataclass(frozen=True, slots=True)
class NeedlessSearch:
    """find_unused_parameters=True, but every step of every rank uses all parameters."""

    share: float
    line: Line | None
    seconds: float
    """Per step."""


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Ranks wait for one another in turn."""

    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointStalls:
    share: float
    """Of the wall time since the first step."""
    count: int
    seconds: float
    """Each."""
    line: Line | None


@dataclass(frozen=True, slots=True)
class GrowingMemory:
    share: float
    """Growth in the second half of the run over the memory at its begin."""
    rank: int
    bytes_per_step: float
    begin_bytes: float
    end_bytes: float
    is_gpu: bool


@dataclass(frozen=True, slots=True)
class StepBound:
    """What a step consists of: not a fault, but what a faster step has to change."""

    share: float
    bottleneck: Bottleneck


ScriptFinding = (
    SlowRank
    | WaitsForCore
    | NoLoaderWorkers
    | SlowInput
    | BlockingCall
    | BlockingCopy
    | TooManyThreads
    | SmallBuckets
    | NeedlessSearch
    | Imbalance
    | CheckpointStalls
    | GrowingMemory
    | StepBound
)


def group_findings(group: RunGroup) -> list[ScriptFinding]:
    """Those of the first run, if most repeats have them, too."""
    found = [one for run in group.runs if (one := find_in_script(run))]
    if not found:
        return []
    counts = Counter(kind for one in found for kind in {type(each) for each in one})
    return [one for one in found[0] if 2 * counts[type(one)] > len(found)]


def group_core_wait(group: RunGroup) -> float | None:
    """The share of the time in which a rank had no core, that of the rank with the most."""
    profiles = [read_script_profile(run) for run in group.runs if run.result is not None]
    shares = [one.core_wait for profile in profiles for one in profile.ranks]
    return max((share for share in shares if share is not None), default=None)


def find_in_script(run: Run) -> list[ScriptFinding]:
    """Of a run of kind profile: faults, the most expensive first, then the rest."""
    if run.settings.kind != "profile" or run.result is None:
        return []
    profile = read_script_profile(run)
    if not profile.ranks or min(one.steps for one in profile.ranks) < STEPS_MIN:
        return []
    found: list[ScriptFinding] = [one for rule in RULES for one in rule(profile)]
    if any(isinstance(one, TooManyThreads) for one in found):
        # Threads that wait for a core make ranks slower than others, now one and now another.
        found = [one for one in found if not isinstance(one, SlowRank | WaitsForCore | Imbalance)]
    if has_contention(run) or any(isinstance(one, SlowRank | WaitsForCore) for one in found):
        found = [one for one in found if not isinstance(one, Imbalance)]
    return sorted(found, key=lambda one: (not is_fault(one), -one.share))


def is_fault(finding: ScriptFinding) -> bool:
    """Whether it costs time or memory that a change of the script or the machine saves."""
    if isinstance(finding, BlockingCall):
        return finding.is_costly
    return not isinstance(finding, StepBound)


def has_contention(run: Run) -> bool:
    share = other_processes_share(run)
    return share is not None and share >= MIN_CONTENTION_SHARE


def _about_slow_rank(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    slow = find_slow_rank(profile)
    if slow is not None:
        yield slow


def _about_input(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    windows = profile.windows
    if windows is None:
        return
    # If only some ranks wait for input, they are stragglers.
    shares = np.median(windows.seconds["input"] / windows.step_seconds, axis=1)
    share = float(shares.min())
    loaders = sorted(profile.ranks[0].loaders, key=lambda one: -one.seconds)
    # Making batches, too, takes longer without a core.
    least = max(COSTLY_INPUT, *(one.core_wait or 0.0 for one in profile.ranks))
    if share < least or not loaders:
        return
    seconds = share * float(np.median(windows.step_seconds))
    first = loaders[0]
    if first.workers:
        spare_cores = _spare_cores(profile, first.workers)
        yield SlowInput(share, first.line, seconds, first.workers, spare_cores)
    elif seconds > HANDOVER_SECONDS:
        yield NoLoaderWorkers(share, first.line, seconds, _spare_cores(profile))


def _spare_cores(profile: ScriptProfile, loader_workers: int = 0) -> int:
    """Of the host of the first rank."""
    first = profile.ranks[0]
    ranks = [one for one in profile.ranks if one.host == first.host]
    used = sum((one.threads or 1) + loader_workers for one in ranks)
    return max(0, (cores_of(ranks) or 0) - used)


def _about_calls(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    """Of the rank that spends most time on each."""
    found: dict[tuple[str, Line], BlockingCall] = {}
    for rank in profile.ranks:
        for call in rank.calls:
            one = _blocking_call(rank, call)
            key = call.name, call.line
            if one is not None and (key not in found or one.share > found[key].share):
                found[key] = one
    yield from found.values()


def _blocking_call(rank: RankFacts, call: Call) -> BlockingCall | None:
    is_collective = call.name.startswith("dist.")
    is_read_back = call.name.startswith(("Tensor.", "torch.cuda."))
    if is_collective and call.bytes > METRIC_BYTES * call.count:
        return None
    if (not is_collective and not is_read_back) or call.steps < EVERY_STEP * rank.counted_steps:
        return None
    per_step = call.seconds / call.steps
    share = rank.share(call.seconds)
    is_costly = share >= COSTLY_CALL
    return BlockingCall(share, call.name, call.line, per_step, call.count / call.steps, is_costly)


def _about_copies(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    """Of the rank that spends most time on each line."""
    found: dict[Line, BlockingCopy] = {}
    for rank in profile.ranks:
        for one in rank.copies:
            share = rank.share(one.seconds)
            is_in_steps = one.steps >= EVERY_STEP * rank.counted_steps
            if not (one.blocks and is_in_steps and share >= COSTLY_CALL):
                continue
            if one.line not in found or share > found[one.line].share:
                per_step = one.seconds / one.steps, one.bytes / one.steps
                found[one.line] = BlockingCopy(share, one.line, *per_step, one.is_pageable)
    yield from found.values()


def _about_threads(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    for host, count in Counter(one.host for one in profile.ranks).items():
        ranks = [one for one in profile.ranks if one.host == host]
        threads, cores = max(one.threads or 1 for one in ranks), cores_of(ranks)
        wanted = sum(one.threads or 1 for one in ranks)
        share = _queue_share(ranks)
        if cores and wanted > cores and share is not None and share >= QUEUE_SHARE:
            is_default = all(one.omp_num_threads is None for one in ranks)
            yield TooManyThreads(share, host, count, threads, cores, is_default)


def _queue_share(ranks: list[RankFacts]) -> float | None:
    """The share of the CPU time that the threads of these ranks ask for and do not get."""
    queue = [one.between("queue_seconds") for one in ranks]
    used = [one.between("cpu_seconds") for one in ranks]
    known = [one for one in (*queue, *used) if one is not None]
    if len(known) < 2 * len(ranks) or not math.fsum(known):
        return None
    return math.fsum(known[: len(ranks)]) / math.fsum(known)


def _about_ddp(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    # Without the search, a parameter that a single rank leaves unused in a single step is an error.
    if not all(model.is_always_used for one in profile.ranks for model in one.ddp_models):
        return
    for model in profile.ranks[0].ddp_models:
        if model.find_unused_parameters and model.searches:
            seconds = model.search_seconds / model.searches
            share = profile.ranks[0].share(model.search_seconds)
            yield NeedlessSearch(share, model.line, seconds)


def _about_communication(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    split = run_iteration_breakdown(profile.run)
    if split is None or not split.total or len(profile.ranks) < 2:
        return
    first, share = profile.ranks[0], split.share("exchange")
    models = first.ddp_models
    if share >= WAIT_SHARE:
        yield from _small_buckets(first, share, models[0] if models else None)
    waiting = split.share("wait")
    if waiting >= COSTLY_WAIT:
        yield Imbalance(waiting, split.seconds["wait"])


def _small_buckets(
    rank: RankFacts, share: float, model: DdpModel | None
) -> Iterator[ScriptFinding]:
    if model is not None and len(model.bucket_bytes) >= BUCKETS_MIN:
        mean_bytes = sum(model.bucket_bytes) / len(model.bucket_bytes)
        if mean_bytes < BUCKET_BYTES:
            yield SmallBuckets(share, model.line, len(model.bucket_bytes), mean_bytes, is_ddp=True)
    for call in rank.calls:
        per_step = call.count / rank.counted_steps
        if call.name != "dist.all_reduce" or call.steps < EVERY_STEP * rank.counted_steps:
            continue
        if per_step >= BUCKETS_MIN and call.bytes < BUCKET_BYTES * call.count:
            mean_bytes = call.bytes / call.count
            yield SmallBuckets(share, call.line, per_step, mean_bytes, is_ddp=False)


def _about_bottleneck(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    # On a busy machine contention explains what looks like a bottleneck.
    if not profile.run.is_finished or has_contention(profile.run):
        return
    bottleneck = find_bottleneck(RunGroup("", [profile.run]))
    if bottleneck is not None:
        yield StepBound(bottleneck.shares[bottleneck.main_share], bottleneck)


def _about_checkpoints(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    for rank in profile.ranks[:1]:
        worker = next(one for one in profile.run.workers if int(one["rank"]) == rank.rank)
        count = int((profile.run.result or {}).get("checkpoints", {}).get("count") or 0)
        spent = float(worker["phases"]["checkpoint"])
        wall = rank.training_seconds + spent + float(worker["phases"]["evaluate"])
        lines = [one for one in rank.calls if one.name == "torch.save"]
        if count > 1 and wall and spent / wall >= COSTLY_CHECKPOINTS:
            costliest = max(lines, key=lambda one: one.seconds, default=None)
            line = costliest.line if costliest else None
            yield CheckpointStalls(spent / wall, count, spent / count, line)


def _about_memory(profile: ScriptProfile) -> Iterator[ScriptFinding]:
    found = [
        one
        for rank in profile.ranks
        for name in ("rss_bytes", "gpu_bytes")
        if (one := _growth(rank, name)) is not None
    ]
    # The ranks do the same.
    yield from sorted(found, key=lambda one: -one.share)[:1]


def _growth(rank: RankFacts, name: str) -> GrowingMemory | None:
    samples = rank.samples[len(rank.samples) // 2 :]
    values = [value for one in samples if (value := getattr(one, name)) is not None]
    if len(values) < max(len(samples), GROWTH_SAMPLES):
        return None
    corners = [values[round(index * (len(values) - 1) / 4)] for index in range(5)]
    rise = corners[-1] - corners[0]
    steps = samples[-1].steps - samples[0].steps
    is_steady = all(after - before >= rise / 10 for before, after in pairwise(corners))
    if rise < max(GROWTH_BYTES, GROWTH_SHARE * corners[0]) or not is_steady or not steps:
        return None
    return GrowingMemory(
        rise / corners[0] if corners[0] else 1.0,
        rank.rank,
        rise / steps,
        corners[0],
        corners[-1],
        is_gpu=name == "gpu_bytes",
    )


RULES: tuple[Callable[[ScriptProfile], Iterator[ScriptFinding]], ...] = (
    _about_slow_rank,
    _about_input,
    _about_calls,
    _about_copies,
    _about_threads,
    _about_ddp,
    _about_communication,
    _about_checkpoints,
    _about_memory,
    _about_bottleneck,
)
