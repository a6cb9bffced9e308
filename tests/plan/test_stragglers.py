"""Workers that wait for stragglers against a simulation of each of their steps."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from paceline.plan.prediction import Predictor
from paceline.plan.stragglers import bounded_mean, expected_maximum
from paceline.plan.target import Target
from paceline.strategies.parameter_server.assignments import AssignmentQueue
from paceline.strategies.strategy import AssignmentRequest
from tests.support.calibrations import calibration

RESIDUALS = np.random.default_rng(0).lognormal(0, 0.3, 200)
RESIDUALS /= RESIDUALS.mean()


def simulated_step(workers: int, slowdown: float, staleness: int, steps: int = 400) -> float:
    """Mean time of a step, for assignments as parameter servers make them."""
    random = np.random.default_rng(1)
    queue = AssignmentQueue(workers, staleness)
    request = AssignmentRequest(first=0, total=steps, checkpoint_every=0, stop=False)
    now = 0.0
    ends: list[tuple[float, int]] = []
    for worker in range(workers):
        queue.request(worker, request)
    while True:
        for worker, assignment in queue.grant():
            if assignment.action == "train":
                factor = 1.0 if worker else slowdown
                heapq.heappush(ends, (now + factor * random.choice(RESIDUALS), worker))
        if not ends:
            return now / steps
        now, worker = heapq.heappop(ends)
        queue.request(worker, request)


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_bounded_staleness_waits_like_the_queue_of_the_servers(
    workers: int, staleness: int
) -> None:
    for slowdown in (1.0, 1.5, 3.0, 12.0):
        slowest = expected_maximum(RESIDUALS, workers, slowdown)
        expected = bounded_mean(workers, slowdown, slowest, staleness)
        assert expected == pytest.approx(simulated_step(workers, slowdown, staleness), rel=0.15)


def test_a_straggler_slows_bounded_servers_between_asynchronous_and_synchronous_ones() -> None:
    predictor = Predictor(calibration())
    times = []
    for options in (
        {"mode": "async"},
        {"mode": "bounded"},
        {"mode": "bounded", "staleness": "1"},
        {"mode": "bounded", "staleness": "0"},
    ):
        target = Target("parameter_server", 4, 256, options, slowdown=8.0)
        times.append(predictor.predict(target).step_seconds.median)
    assert times == sorted(set(times))
