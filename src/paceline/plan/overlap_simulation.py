"""Event simulation of collectives that overlap the backward pass of the slowest worker.

Collectives start in order, each when its gradients are ready and one of the communicator's threads
is free. The round trips of two collectives overlap; their transfers share the link. While a
collective is in progress, computation is slower, and vice versa.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.calibration import Contention
from paceline.plan.collective_cost import CollectiveTime

GLOO_THREADS = 2
"""Collectives that a process group of gloo has in progress at once (comm/process_groups.py)."""
NO_CONTENTION = Contention()
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
    """A collective in progress."""

    __slots__ = ("busy", "delay")

    def __init__(self, time: CollectiveTime) -> None:
        self.delay, self.busy = time.delay_seconds, time.busy_seconds

    @property
    def is_done(self) -> bool:
        return self.delay <= EPSILON and self.busy <= EPSILON


def simulate_overlap(
    backward_seconds: float,
    transfers: Sequence[Transfer],
    threads: int = GLOO_THREADS,
    contention: Contention = NO_CONTENTION,
) -> OverlapTimes:
    """Simulate transfers, which start in the given order.

    With `backward_seconds` of 0, all of them are ready at once.
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
        compute_rate = 1 / contention.compute_slowdown if active else 1.0
        sharing = sum(each.delay <= EPSILON for each in active)
        busy_rate = 1 / (contention.communication_slowdown if is_computing else 1.0)
        share = busy_rate / sharing if sharing else 0.0
        steps = [each.delay if each.delay > EPSILON else each.busy / share for each in active]
        if is_computing:
            target = backward_seconds
            if waiting and len(active) < threads:
                target = min(target, max(waiting[-1].ready * backward_seconds, computed))
            steps.append((target - computed) / compute_rate)
        step = max(0.0, min(steps))
        now += step
        for each in active:
            if each.delay > EPSILON:
                each.delay -= step
            else:
                each.busy -= step * share
        active = [each for each in active if not each.is_done]
        if is_computing:
            computed += step * compute_rate
            hidden += step if sharing or len(steps) > 1 else 0.0
            if computed >= backward_seconds - EPSILON:
                backward_ended = now
    return OverlapTimes(backward_ended, max(now, backward_ended), hidden)
