"""Steps of each strategy, with collective times that make the answer obvious."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.plan.calibration import Gradient
from paceline.plan.collective_cost import CollectiveTime
from paceline.plan.job import Compute, Job
from paceline.plan.overlap_simulation import Transfer, simulate_overlap
from paceline.plan.step_simulation import STRATEGIES, fsdp_blocks, simulate_step
from paceline.strategies import STRATEGIES as REGISTERED
from paceline.strategies.bucket_layout import MIB

COMPUTE = Compute(0.1, 0.2, 0.6, 0.1)
GRADIENTS = tuple(Gradient(MIB, ready) for ready in (1.0, 0.75, 0.5, 0.25))


def job(strategy: str, options: Mapping[str, str] | None = None, workers: int = 4) -> Job:
    """A second of compute; collectives take a second per 10 MiB, without latency."""

    def collective(_operation: str, _algorithm: str, size_bytes: float) -> CollectiveTime:
        return CollectiveTime(0.0, size_bytes / (10 * MIB))

    return Job(
        strategy, options or {}, workers, workers, GRADIENTS, 4 * MIB, COMPUTE, collective,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "options", "seconds"),
    [
        ("gather_scatter", {}, 1.4),
        ("allreduce", {}, 1.4),
        ("ring", {}, 1.4),
        ("tree", {}, 1.4),
        # A quarter of the update, twice the exchange: reduce-scatter and all-gather.
        ("sharded", {}, 0.925 + 0.8),
        # The weights are gathered twice.
        ("fsdp", {}, 0.925 + 1.2),
        ("local_sgd", {}, 1.0 + 0.8 / 8),
        ("local_sgd", {"every": "2"}, 1.0 + 0.8 / 2),
        ("easgd", {}, 1.0 + 0.4 / 6),
        # Three remote gradients through the server's link; they wait for the first weights.
        ("parameter_server", {}, 0.9 + 1.2 + 0.7 * 1.2 + 0.1 * (1 + 0.5 * 3)),
        (
            "parameter_server",
            {"servers": "4", "place": "spread"},
            0.9 + 0.3 + 0.7 * 0.3 + 0.025 * 2.5,
        ),
    ],
)
def test_exposed_communication_adds_to_compute(
    strategy: str, options: dict[str, str], seconds: float
) -> None:
    step = simulate_step(job(strategy, options))
    assert step.seconds == pytest.approx(seconds)
    assert step.seconds == pytest.approx(step.compute_seconds + step.exchange_seconds)


@pytest.mark.parametrize("strategy", ["overlap", "ddp"])
def test_buckets_overlap_the_backward_pass(strategy: str) -> None:
    """Each bucket takes 0.1 s and is ready 0.15 s after the last: only the last is exposed."""
    step = simulate_step(job(strategy, {"bucket_mib": "1"}))
    assert step.seconds == pytest.approx(1.1)
    assert step.exchange_seconds == pytest.approx(0.1)
    assert step.hidden_seconds == pytest.approx(0.3)


def test_buckets_queue_when_the_link_is_slower_than_the_backward_pass() -> None:
    transfers = [Transfer(when, CollectiveTime(0.0, 1.0)) for when in (0.25, 0.5, 1.0)]
    times = simulate_overlap(1.0, transfers)
    assert times.end == pytest.approx(0.25 + 3.0)
    assert times.backward == 1.0
    assert times.hidden == pytest.approx(0.75)


def test_round_trips_of_two_collectives_overlap() -> None:
    transfers = [Transfer(0.0, CollectiveTime(1.0, 0.5))] * 4
    assert simulate_overlap(0.0, transfers, threads=1).end == pytest.approx(6.0)
    # While one waits, the other transfers: two need the link for two thirds of the time.
    assert simulate_overlap(0.0, transfers, threads=2).end == pytest.approx(3.0)
    # With short round trips the link is never idle.
    transfers = [Transfer(0.0, CollectiveTime(0.5, 1.0))] * 4
    assert simulate_overlap(0.0, transfers, threads=2).end == pytest.approx(4.0)


@pytest.mark.parametrize(("workers", "hosts"), [(2, 2), (4, 2)])
def test_no_worker_has_its_weights_before_one_share_was_sent(workers: int, hosts: int) -> None:
    """A message takes a second of latency; workers on the host of the server share its memory."""

    def collective(_operation: str, _algorithm: str, size_bytes: float) -> CollectiveTime:
        return CollectiveTime(1.0, size_bytes / (10 * MIB))

    known = replace(job("parameter_server", workers=workers), hosts=hosts, collective=collective)
    remote = workers - workers // hosts
    exchange = (1 + 0.4) + (1 + 0.4 * remote)
    update = 0.1 * (1 + 0.5 * (workers - 1))
    assert simulate_step(known).seconds == pytest.approx(0.9 + exchange + update)


def test_one_worker_does_not_communicate() -> None:
    for strategy in STRATEGIES:
        assert simulate_step(job(strategy, workers=1)).seconds == pytest.approx(1.0)


def test_workers_of_one_host_share_weights() -> None:
    step = simulate_step(replace(job("shared"), hosts=1))
    assert step.seconds == pytest.approx(0.925 + 0.2)
    with pytest.raises(UsageError, match="--hosts 1"):
        simulate_step(job("shared"))


def test_biases_and_norms_belong_to_the_block_of_their_weight() -> None:
    assert fsdp_blocks([1000, 10, 10, 5000, 40, 200]) == [1020, 5240]


def test_asynchronous_workers_wait_for_a_saturated_server_only() -> None:
    fast = simulate_step(job("parameter_server", {"mode": "async"}, workers=2))
    # With many workers, the server's link is the bottleneck: one gradient after the other.
    many = simulate_step(job("parameter_server", {"mode": "async"}, workers=64))
    service = 63 / 64 * 0.4 + 0.1
    assert many.seconds == pytest.approx(64 * service, rel=0.01)
    assert fast.seconds < 2 * fast.compute_seconds


def test_every_planned_strategy_exists() -> None:
    names = {entry.name for entry in REGISTERED}
    assert set(STRATEGIES) <= names
    assert names - set(STRATEGIES) == {"single"}


def test_an_unknown_strategy_is_one_line_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="overlap"):
        simulate_step(job("overlapp"))


def test_software_of_concurrent_collectives_hides_behind_round_trips() -> None:
    """Two collectives of 2 ms of software take three times as long at once; waiting hides it."""

    def seconds(delay: float, slowdown: float, count: int = 2) -> float:
        transfers = [Transfer(0.0, CollectiveTime(delay, 2e-3))] * count
        return simulate_overlap(0.0, transfers, concurrent_slowdown=slowdown).end

    assert seconds(0.0, 3.0) == pytest.approx(2 * 3 * 2e-3)
    assert seconds(20e-3, 3.0) == pytest.approx(22e-3)
    assert seconds(0.0, 3.0, count=1) == pytest.approx(2e-3)
