"""One step of up to 10,000 workers, each with its own compute time, and days with failures.

Rounds are those of message_rounds.py, computed for all workers at once: a message starts when its
sender and its receiver are free, and a worker is free when its messages of the round have
arrived. Messages between racks share the uplinks of the racks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.plan.collective_cost import RoundTimes
from paceline.plan.job import Job
from paceline.plan.message_rounds import MESSAGE_ROUNDS, MessageRound, Ranks
from paceline.plan.step_simulation import algorithm_of, bucket_layout, exchanges_of

Floats = NDArray[np.float64]

DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Racks:
    """Hosts in racks; the uplink of a rack is slower than its hosts together."""

    size: int
    oversubscription: float = 1.0

    def slowdown(self, senders: Ranks, receivers: Ranks) -> Floats:
        """How many times longer the transfer of each message takes because of the uplinks.

        Senders and receivers are numbers of hosts.
        """
        source, target = senders // self.size, receivers // self.size
        crosses = source != target
        count = int(max(source.max(initial=0), target.max(initial=0))) + 1
        load = self.oversubscription / self.size
        up = np.bincount(source[crosses], minlength=count) * load
        down = np.bincount(target[crosses], minlength=count) * load
        shared = np.maximum(up[source], down[target])
        found: Floats = np.where(crosses, np.maximum(shared, 1.0), 1.0)
        return found


CollectiveEnds = Callable[[Floats, str, str, float], Floats]
"""When each worker ends a collective: by its starts, the operation, the algorithm and the bytes."""


class VectorizedCollectives:
    """When each worker ends a collective that it starts at its own time."""

    def __init__(
        self,
        times: Callable[[str, str], RoundTimes],
        racks: Racks | None = None,
        workers_per_host: int = 1,
    ) -> None:
        """`times` returns the round times of an operation and algorithm."""
        self._times, self._racks = times, racks
        self._workers_per_host = workers_per_host

    def __call__(self, starts: Floats, operation: str, algorithm: str, size_bytes: float) -> Floats:
        times = self._times(operation, algorithm)
        workers = len(starts)
        if workers == 1:
            return starts
        is_ring = algorithm in ("ring", "library")
        if operation == "all_reduce" and is_ring:
            return self._ring(starts, 2 * (workers - 1), size_bytes / workers, times)
        if operation in ("reduce_scatter", "all_gather"):
            return self._ring(starts, workers - 1, size_bytes / workers, times)
        if operation == "all_reduce" and algorithm == "root":
            return self._root(starts, size_bytes, times)
        if operation == "all_reduce" and algorithm in MESSAGE_ROUNDS:
            ends = starts
            for each in MESSAGE_ROUNDS[algorithm](workers):
                ends = self._messages(ends, each, size_bytes, times)
            return ends
        raise UsageError(f"cannot simulate {operation} by {algorithm}")

    def _ring(self, starts: Floats, rounds: int, size_bytes: float, times: RoundTimes) -> Floats:
        ranks = np.arange(len(starts))
        slow = self._slowdown(ranks, np.roll(ranks, -1))
        # A round of the ring takes as long as its slowest message, since neighbors wait.
        spent = np.array([times(size_bytes * each) for each in np.unique(slow)])
        of_message = spent[np.searchsorted(np.unique(slow), slow)]
        ends = starts
        for done in range(rounds):
            if ends.min() == ends.max() and of_message.min() == of_message.max():
                rest: Floats = ends + (rounds - done) * of_message[0]
                return rest
            sent = np.maximum(ends, np.roll(ends, -1)) + of_message
            ends = np.maximum(sent, np.roll(sent, 1))
        return ends

    def _messages(
        self, starts: Floats, round_: MessageRound, size_bytes: float, times: RoundTimes
    ) -> Floats:
        senders, receivers = round_.senders, round_.receivers
        slow = self._slowdown(senders, receivers)
        spent = np.array([times(round_.share * size_bytes * each) for each in slow])
        arrived = np.maximum(starts[senders], starts[receivers]) + spent
        ends = starts.copy()
        np.maximum.at(ends, senders, arrived)
        np.maximum.at(ends, receivers, arrived)
        return ends

    def _root(self, starts: Floats, size_bytes: float, times: RoundTimes) -> Floats:
        """All messages share the root's link: it is busy until the last byte of the last one.

        Those from other racks also share the uplink of the root's rack.
        """
        peers = len(starts) - 1
        latency = times(0.0)
        senders, receivers = np.arange(1, peers + 1), np.zeros(peers, np.int64)
        slow = float(self._slowdown(senders, receivers).max()) / peers
        service = (times(peers * size_bytes) - latency) / peers * max(1.0, slow)
        arrivals = np.sort(np.maximum(starts[1:], starts[0]))
        # Each arrival waits for the earlier ones, or finds the link idle.
        received = np.max(arrivals + service * np.arange(peers, 0, -1)) + latency
        return np.full(len(starts), float(received + latency + peers * service))

    def _slowdown(self, senders: Ranks, receivers: Ranks) -> Floats:
        if self._racks is None:
            return np.ones(len(senders))
        per_host = self._workers_per_host
        return self._racks.slowdown(senders // per_host, receivers // per_host)


def simulate_cluster_step(job: Job, compute_factors: Floats, collective: CollectiveEnds) -> Floats:
    """When each worker ends a step; `compute_factors` multiply the compute time of each worker."""
    compute = job.compute
    began = compute_factors * (compute.input + compute.forward)
    computed = began + compute_factors * compute.backward
    update = compute_factors * compute.update
    layout = bucket_layout(job)
    if layout is not None:
        link_free = np.zeros(len(began))
        for bucket in layout:
            ready = max(job.gradients[index].ready for index in bucket)
            size = float(sum(job.gradients[index].size_bytes for index in bucket))
            starts = np.maximum(began + ready * compute_factors * compute.backward, link_free)
            link_free = collective(
                starts, "all_reduce", algorithm_of(job.strategy, job.options), size
            )
        return np.maximum(computed, link_free) + update
    ends = computed
    is_sharded = job.strategy == "sharded"
    for number, (operation, algorithm, size) in enumerate(exchanges_of(job)):
        if is_sharded and number == 1:
            ends = ends + update / job.workers
        ends = collective(ends, operation, algorithm, size)
    return ends if is_sharded else ends + update


def racks_factor(job: Job, times: Callable[[str, str], RoundTimes], racks: Racks) -> float:
    """How many times longer a step takes with these racks than with one switch."""
    if job.hosts == 1:
        return 1.0
    even, per_host = np.ones(job.workers), -(-job.workers // job.hosts)
    with_racks, without = (
        simulate_cluster_step(job, even, VectorizedCollectives(times, each, per_host)).max()
        for each in (racks, None)
    )
    return float(with_racks / without)


@dataclass(frozen=True, slots=True)
class Failures:
    """What interrupts training, and what it costs."""

    mean_hours_between: float
    """Of one worker."""
    checkpoint_every_seconds: float
    checkpoint_seconds: float
    """Training blocked by a checkpoint."""
    restart_seconds: float
    """From a failure until training continues from the last checkpoint."""


@dataclass(frozen=True, slots=True)
class Day:
    """Where the time of a day goes, as shares of it."""

    goodput: float
    """Steps that count."""
    checkpoints: float
    lost: float
    """Steps that a restart repeats."""
    restarts: float
    failures: float

    @staticmethod
    def mean(days: Sequence[Day]) -> Day:
        return Day(
            fmean(day.goodput for day in days),
            fmean(day.checkpoints for day in days),
            fmean(day.lost for day in days),
            fmean(day.restarts for day in days),
            fmean(day.failures for day in days),
        )


DAYS = 100
"""Simulated days of which the mean is shown."""


def simulate_days(workers: int, failures: Failures, days: int = DAYS) -> Day:
    """The mean of several days."""
    random = np.random.default_rng(0)
    return Day.mean([simulate_day(workers, failures, random) for _ in range(days)])


def simulate_day(
    workers: int, failures: Failures, random: np.random.Generator, seconds: float = DAY_SECONDS
) -> Day:
    """Simulate a day in which any worker's failure restarts all of them."""
    mean = failures.mean_hours_between * 3600 / workers
    now = useful = checkpoints = lost = restarts = 0.0
    count = 0
    next_failure = random.exponential(mean)
    cycle = failures.checkpoint_every_seconds + failures.checkpoint_seconds
    while now < seconds:
        end = min(next_failure, seconds)
        whole = int((end - now) // cycle)
        rest = end - now - whole * cycle
        useful += whole * failures.checkpoint_every_seconds
        checkpoints += whole * failures.checkpoint_seconds
        if next_failure >= seconds:
            trained = min(rest, failures.checkpoint_every_seconds)
            useful += trained
            checkpoints += rest - trained
            break
        lost += rest
        count += 1
        restarted = min(end + failures.restart_seconds, seconds)
        restarts += restarted - end
        now = restarted
        next_failure = now + random.exponential(mean)
    return Day(
        useful / seconds, checkpoints / seconds, lost / seconds, restarts / seconds, float(count)
    )
