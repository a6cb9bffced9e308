"""What hooks cost the passes of a step: launches of collectives, and contention.

Hooks and launches take time in every backward pass, and with FSDP in both passes. While a
collective is in progress, it also needs cores and memory bandwidth of its worker, so the backward
pass is slower. Both depend on the machine, and runs of these strategies show them: their passes
take longer than without communication. The noise of short runs is as large, so estimates are
drawn towards what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.plan.calibration import MeasuredRun
from paceline.plan.codec_cost import CODEC_OPTIONS
from paceline.plan.collective_times import Place
from paceline.plan.step_simulation import BUCKET_STRATEGIES
from paceline.plan.target import Target

LAUNCH_SECONDS, LAUNCH_DEVIATION = 5e-4, 3e-4
"""Mean and standard deviation of launches in one backward pass on CPUs
(docs/results.md#contention). On GPUs, kernels hide launches, so the mean is 0."""
FSDP_DEVIATION = 5e-3
"""Of what hooks of FSDP take in a step: 4 ms of `lenet` with five blocks on a CPU."""
CONTENTION_DEVIATION = 0.5
"""Of the slowdown on CPUs, which is about 0 on nodes with cores of their own."""
LEAST_OVERLAP = 0.1
"""Share of the backward pass; runs that overlap less say nothing about contention, and runs that
overlap more say little about launches."""


@dataclass(frozen=True, slots=True)
class OverlapCosts:
    launch_seconds: float = 0.0
    """Per step."""
    contention: float = 0.0
    """Slowdown of the backward pass while a collective is in progress: at 0.5, it takes 1.5 times
    as long."""


def overlap_costs(
    runs: Iterable[MeasuredRun],
    target: Target,
    alone_seconds: Callable[[MeasuredRun], float],
    deviation: float,
) -> OverlapCosts:
    """From runs without codec in the same place: of the same strategy, if there are any.

    Without such runs, there are no costs: what is usual on CPUs is not on GPUs.
    `alone_seconds` is the time of the run's passes with hooks without communication, `deviation`
    its relative standard deviation.
    """
    strategies = ("fsdp",) if target.strategy == "fsdp" else BUCKET_STRATEGIES
    known = [
        run
        for run in runs
        if run.strategy in strategies
        and Place(run.backend, run.hosts > 1, run.link) == target.place
        and "backward" in run.phases
        and not set(CODEC_OPTIONS) & run.options.keys()
    ]
    if not known:
        return OverlapCosts()
    launches = _Estimate(LAUNCH_SECONDS, LAUNCH_DEVIATION)
    if target.strategy == "fsdp":
        launches = _Estimate(0.0, FSDP_DEVIATION)
    elif target.place.backend == "nccl":
        launches = _Estimate(0.0, LAUNCH_DEVIATION)
    slowdowns = _Estimate(0.0, CONTENTION_DEVIATION)
    overlapping = [run for run in known if _overlaps(run)]
    for run in _preferred([run for run in known if not _overlaps(run)], target.strategy):
        alone = alone_seconds(run)
        launches.add(_measured_seconds(run) - alone, deviation * alone)
    launch_seconds = max(0.0, launches.mean)
    for run in _preferred(overlapping, target.strategy):
        alone = alone_seconds(run)
        slowed = _measured_seconds(run) - alone - launch_seconds
        # Of the overlapped time, this part was left for the backward pass.
        left = run.hidden_exchange_seconds - slowed
        if left > 0:
            slowdowns.add(slowed / left, deviation * alone / left)
    return OverlapCosts(launch_seconds, max(0.0, slowdowns.mean))


def phases_with_hooks(strategy: str) -> tuple[str, ...]:
    return ("forward", "backward") if strategy == "fsdp" else ("backward",)


def _measured_seconds(run: MeasuredRun) -> float:
    return math.fsum(run.phases.get(phase, 0.0) for phase in phases_with_hooks(run.strategy))


def _overlaps(run: MeasuredRun) -> bool:
    return run.hidden_exchange_seconds >= LEAST_OVERLAP * run.phases["backward"]


def _preferred(runs: list[MeasuredRun], strategy: str) -> list[MeasuredRun]:
    return [run for run in runs if run.strategy == strategy] or runs


class _Estimate:
    """Mean of what is usual and of measurements, by their variances."""

    def __init__(self, usual: float, deviation: float) -> None:
        self._weight = 1 / deviation**2
        self._sum = usual * self._weight

    def add(self, value: float, deviation: float) -> None:
        self._weight += 1 / max(deviation, 1e-9) ** 2
        self._sum += value / max(deviation, 1e-9) ** 2

    @property
    def mean(self) -> float:
        return self._sum / self._weight
