"""Time accounting: waiting, exposed and overlapped communication are separated."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.strategies import create_strategy
from paceline.strategies.strategy import Strategy
from paceline.training.coordination import ClockOffset, attribute_waits, measure_clock_offset
from tests.strategies.contract.harness import Connections, Task, build_replica, run_ranks
from tests.support.worker_pool import WorkerPool

STEPS = 4
LATE_SECONDS = 0.15
SLOW_BACKWARD_SECONDS = 0.05
AVERAGING = ("gather_scatter", "allreduce", "ring", "tree", "halving_doubling", "overlap", "ddp")


@dataclass(frozen=True)
class Account:
    phases: dict[str, float]
    wall_seconds: float
    hidden_seconds: float


class _Slow(torch.autograd.Function):
    """Slow in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(SLOW_BACKWARD_SECONDS)
        return gradients[0]


class SlowInTheMiddle(nn.Module):
    """The gradients of the second layer are ready long before those of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = _Slow.apply(self.first(inputs))  # type: ignore[no-untyped-call]
        outputs: Tensor = self.second(hidden)
        return outputs


@dataclass(frozen=True)
class SlowTask(Task):
    late_rank: int | None = None


def account(connections: Connections, name: str, task: SlowTask) -> Account:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buckets = {"bucket_mib": "0.01"} if name in ("ddp", "overlap") else {}
        if name == "overlap":
            buckets["first_bucket_mib"] = "0.01"
        strategy = create_strategy(name, buckets)
        strategy.setup(build_replica(SlowInTheMiddle(), connections, task))
        offset = ClockOffset(measure_clock_offset(connections.communicator))
        # The first step creates connections and buckets.
        _step(strategy, late=False)
        attribute_waits(
            connections.communicator, strategy.replica.clock, strategy.replica.exposed, offset
        )
        clock = strategy.replica.clock
        clock.enter("other")
        before, wall, hidden = dict(clock.seconds), clock.wall_seconds, _hidden(strategy)
        for _ in range(STEPS):
            _step(strategy, late=connections.communicator.rank == task.late_rank)
        clock.enter("other")
        attribute_waits(connections.communicator, clock, strategy.replica.exposed, offset)
        phases = {phase: spent - before[phase] for phase, spent in clock.seconds.items()}
        result = Account(phases, clock.wall_seconds - wall, _hidden(strategy) - hidden)
        strategy.finish()
        return result


def _hidden(strategy: Strategy) -> float:
    return strategy.replica.hidden_exchange_seconds


def _step(strategy: Strategy, late: bool) -> None:
    replica = strategy.replica
    replica.clock.enter("forward")
    loss = replica.forward(torch.ones(2, 64)).mean()
    if late:
        time.sleep(LATE_SECONDS)
    replica.clock.enter("backward")
    strategy.backward(loss)
    strategy.step()


@pytest.mark.parametrize("name", AVERAGING)
def test_waiting_for_a_straggler_is_separated_from_communication(
    pool: WorkerPool, name: str
) -> None:
    accounts = run_ranks(pool, 3, account, name, SlowTask(late_rank=1))
    late = STEPS * LATE_SECONDS
    for rank in (0, 2):
        waited = accounts[rank].phases["wait"]
        assert 0.5 * late < waited < accounts[rank].wall_seconds, f"rank {rank} waited {waited} s"
    assert accounts[1].phases["wait"] < 0.5 * late, "the late one waited for the others"
    for rank, own in enumerate(accounts):
        total = sum(own.phases.values())
        assert total == pytest.approx(own.wall_seconds, rel=0.01), f"rank {rank}'s phases"
        assert min(own.phases.values()) > -1e-6, f"rank {rank} has a phase of less than nothing"


@pytest.mark.parametrize("name", ["overlap", "ddp"])
def test_overlapped_communication_is_reported_beside_the_phases(
    pool: WorkerPool, name: str
) -> None:
    """The bucket of the second layer is reduced while the first layer sleeps."""
    for own in run_ranks(pool, 2, account, name, SlowTask()):
        assert own.hidden_seconds > 0
        assert own.phases["backward"] > 0.9 * STEPS * SLOW_BACKWARD_SECONDS
        assert sum(own.phases.values()) == pytest.approx(own.wall_seconds, rel=0.01)


@pytest.mark.parametrize("name", ["allreduce", "ring"])
def test_no_overlapped_communication_without_overlap(pool: WorkerPool, name: str) -> None:
    for own in run_ranks(pool, 2, account, name, SlowTask()):
        assert own.hidden_seconds == 0


@pytest.mark.parametrize("name", ["overlap", "ddp"])
def test_single_worker_has_no_overlapped_communication(pool: WorkerPool, name: str) -> None:
    (own,) = run_ranks(pool, 1, account, name, SlowTask())
    assert own.hidden_seconds == 0
