"""Event simulation of collectives that overlap the backward pass of the slowest worker.

Collectives start in order, each when its gradients are ready and one of the communicator's threads
is free. The rounds of two collectives alternate: while one waits for a round trip, the other uses
the link, so both progress at full speed unless they need more than the whole link. Threads of
collectives that are in progress at once slow the software of each other. A worker has no more
threads for the backward pass than cores, so while it encodes a gradient, both progress at half
speed. While collectives are in progress, contention slows the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.collective_cost import CollectiveTime

GLOO_THREADS = 2
"""Collectives that a process group of gloo has in progress at once (comm/process_groups.py)."""
EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class Transfer:
    ready: float
    """When its gradients are ready, as a fraction of the backward pass."""
    time: CollectiveTime


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Seconds since the start of the backward pass."""

    backward: float
    """When the backward pass ends, slowed by communication."""
    end: float
    """When the last collective has ended; at least `backward`."""
    hidden: float
    """Time with a collective in progress during the backward pass."""


class _Active:
    """A collective in progress: it is encoded, then its rounds wait and use the link in turns."""

    __slots__ = ("_busy", "_delay", "_software", "codec", "rounds")

    def __init__(self, time: CollectiveTime) -> None:
        self.codec, self._delay = time.codec_seconds, time.delay_seconds
        self._busy, self._software = time.busy_seconds, time.software_seconds
        self.rounds = 1.0
        """The share that is not done."""

    @property
    def is_done(self) -> bool:
        return self.codec <= EPSILON and self.rounds * (self._delay + self._busy) <= EPSILON

    @property
    def is_encoding(self) -> bool:
        return self.codec > EPSILON

    @property
    def alone_seconds(self) -> float:
        """Of all rounds, with the link to itself."""
        return max(self._delay + self._busy, EPSILON)

    def load(self, concurrent_slowdown: float) -> float:
        """Time that it needs of what collectives in progress share, relative to that of its rounds
        with the link to itself."""
        if self.is_encoding:
            return 0.0
        busy = self._busy + (concurrent_slowdown - 1) * self._software
        return busy / self.alone_seconds

    def seconds_left(self, codec_rate: float, rounds_seconds: float) -> float:
        """Of what it does now; all of its rounds take `rounds_seconds`."""
        return self.codec / codec_rate if self.is_encoding else self.rounds * rounds_seconds

    def progress(self, seconds: float, codec_rate: float, rounds_seconds: float) -> None:
        if self.is_encoding:
            self.codec -= seconds * codec_rate
        else:
            self.rounds -= seconds / rounds_seconds


def simulate_overlap(
    backward_seconds: float,
    transfers: Sequence[Transfer],
    threads: int = GLOO_THREADS,
    concurrent_slowdown: float = 1.0,
    contention: float = 0.0,
) -> OverlapTimes:
    """Simulate transfers, which start in the given order.

    With `backward_seconds` of 0, all of them are ready at once. `concurrent_slowdown` is that of
    the software of collectives that are in progress at once; `contention` is the slowdown of the
    backward pass meanwhile: 0.5 takes 1.5 times as long.
    """
    now, computed, hidden = 0.0, 0.0, 0.0
    backward_ended = 0.0 if backward_seconds <= 0 else math.inf
    waiting = [*transfers][::-1]
    active: list[_Active] = []
    while waiting or active or backward_ended == math.inf:
        is_computing = backward_ended == math.inf
        while (
            waiting
            and len(active) < threads
            and (not is_computing or waiting[-1].ready * backward_seconds <= computed + EPSILON)
        ):
            active.append(_Active(waiting.pop().time))
        compute_rate = 1 / (1 + contention) if active else 1.0
        codec_rate = 1.0
        if is_computing and any(each.is_encoding for each in active):
            compute_rate, codec_rate = min(compute_rate, 0.5), 0.5
        concurrent = concurrent_slowdown if len(active) > 1 else 1.0
        load = max(1.0, math.fsum(each.load(concurrent) for each in active))
        rates = [(codec_rate, each.alone_seconds * load) for each in active]
        steps = [each.seconds_left(*rate) for each, rate in zip(active, rates, strict=True)]
        if is_computing:
            target = backward_seconds
            if waiting and len(active) < threads:
                target = min(target, max(waiting[-1].ready * backward_seconds, computed))
            steps.append((target - computed) / compute_rate)
        step = max(0.0, min(steps))
        now += step
        for each, rate in zip(active, rates, strict=True):
            each.progress(step, *rate)
        active = [each for each in active if not each.is_done]
        if is_computing:
            computed += step * compute_rate
            hidden += step if len(steps) > 1 else 0.0
            if computed >= backward_seconds - EPSILON:
                backward_ended = now
    return OverlapTimes(backward_ended, max(now, backward_ended), hidden)
