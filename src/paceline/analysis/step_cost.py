"""What a training step costs: time, exposed communication, bytes and memory of a worker, loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.analysis.communication import run_traffic
from paceline.analysis.phases import COMPUTE_PHASES, PhaseBreakdown, iteration_breakdown
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup, known
from paceline.analysis.validation import is_number
from paceline.records import MEMORY_KEYS


@dataclass(frozen=True, slots=True)
class StepCost:
    """Means over the finished runs of a configuration and their workers; None where unknown."""

    group: RunGroup
    seconds: float
    split: PhaseBreakdown | None
    """Of a step."""
    sent_bytes: float | None
    """By a worker in a step."""
    memory: dict[str, float | None]
    """By MEMORY_KEYS, of the worker with the most."""
    loss: float | None
    """Of the test set; of training if there is none."""

    @property
    def compute_seconds(self) -> float | None:
        return self.split.of(COMPUTE_PHASES) if self.split else None


def step_costs(groups: Sequence[RunGroup]) -> list[StepCost]:
    """One per configuration with timed steps."""
    return [cost for group in groups if (cost := step_cost(group)) is not None]


def step_cost(group: RunGroup) -> StepCost | None:
    means = group.iteration_means
    if not means:
        return None
    return StepCost(
        group,
        fmean(means),
        iteration_breakdown(group),
        _mean(map(sent_bytes_per_step, group.timed)),
        {key: _mean(worker_memory(run, key) for run in group.timed) for key in MEMORY_KEYS},
        group.mean_of("test_loss") if group.finals("test_loss") else group.mean_of("train_loss"),
    )


def sent_bytes_per_step(run: Run) -> float | None:
    """Bytes that a worker sends in a step, mean over the workers.

    Without the initial weights and what is gathered at the end, unless the records of an earlier
    version hold only the sum over the run.
    """
    each = []
    for worker in run.workers:
        later = worker.get("after_first") or {}
        sent, count = later.get("bytes_sent"), later.get("iterations")
        if sent is None or not count:
            break
        each.append(sum(sent.values()) / count)
    else:
        return fmean(each) if each else None
    rates = [traffic.bytes_per_iteration for traffic in run_traffic(run).values()]
    known_rates = known(rates)
    if len(known_rates) < len(rates):
        return None
    return sum(known_rates) / len(run.workers)


def worker_memory(run: Run, key: str) -> float | None:
    """One of MEMORY_KEYS, of the worker with the most; None if no worker recorded it."""
    found = ((worker.get("memory") or {}).get(key) for worker in run.workers)
    return max((float(value) for value in found if is_number(value)), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    found = known(values)
    return fmean(found) if found else None
