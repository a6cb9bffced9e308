"""Captured steps that communicate: same weights and same accounts as eager steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.comm.in_process import single
from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock, clock_for
from paceline.strategies import create_strategy
from paceline.training.gpu.cuda_graph import CudaGraphBackend, GraphCache
from tests.strategies.test_overlap_measurement import AloneAsTwo
from tests.support import odd_shapes as odd
from tests.support import toy_replicas as toy

GPU = torch.device("cuda:0")
STEPS = 40

pytestmark = pytest.mark.gpu


def train(communicator: Communicator, name: str, options: dict[str, str], *, graphs: bool) -> Any:
    """Train on one GPU; return weights, traffic, exposed intervals and captured graphs."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(256, 256) for _ in range(4)]
    replica = odd.build(communicator, toy.sgd(), nn.Sequential(*layers).to(GPU))
    clock = clock_for(GPU, PhaseClock())
    assert isinstance(clock, CudaPhaseClock)
    replica.clock = clock
    strategy = create_strategy(name, options)
    strategy.setup(replica)
    assert strategy.capture_obstacle() is None
    cache = GraphCache(
        CudaGraphBackend(),
        [clock, *strategy.replay_observers()],
        warmup=strategy.warmup_steps if graphs else 10**9,
        is_warm=strategy.is_warm,
    )
    inputs = torch.randn(64, 256, device=GPU)

    def step() -> torch.Tensor:
        clock.enter("forward")
        loss: torch.Tensor = replica.forward(inputs).square().mean()
        clock.enter("backward")
        strategy.backward(loss)
        strategy.step()
        clock.enter("other")
        return loss.detach()

    for _ in range(STEPS):
        cache.run(strategy.capture_key(), step)
    if strategy.meter is not None:
        strategy.meter.settle()
    exposed = len(replica.exposed.began)
    weights = [weight.detach().cpu() for weight in replica.model.parameters()]
    traffic = communicator.traffic.to_dict()["gradients"]
    strategy.finish()
    return weights, traffic, exposed, cache.report, replica


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", {}),
        ("overlap", {"bucket_mib": "0.25"}),
        ("ddp", {"bucket_mib": "0.25"}),
        ("local_sgd", {"every": "3"}),
    ],
)
def test_captured_exchange_through_nccl_equals_the_eager_one(
    name: str, options: dict[str, str]
) -> None:
    runs = []
    for graphs in (False, True):
        with torch.cuda.stream(torch.cuda.Stream()), AloneAsTwo.connected() as communicator:
            *outcome, replica = train(communicator, name, options, graphs=graphs)
            hidden = replica.hidden_exchange_seconds
            del replica
            # Graphs and DDP keep the connections of NCCL in use.
            gc.collect()
            runs.append((*outcome, hidden))
    (eager, eager_traffic, eager_exposed, *_), (captured, traffic, exposed, report, hidden) = runs
    assert report.captured, report.reason
    assert all(map(torch.equal, captured, eager))
    assert exposed == eager_exposed
    for key in ("bytes_sent", "messages"):
        assert traffic[key] == eager_traffic[key]
    if name != "local_sgd":
        assert traffic["seconds"] > 0
    if name in ("overlap", "ddp") and options:
        assert hidden > 0


@pytest.mark.parametrize("name", ["allreduce", "overlap", "ddp", "sharded", "local_sgd", "easgd"])
def test_captured_step_of_a_single_worker_equals_the_eager_one(name: str) -> None:
    runs = []
    for graphs in (False, True):
        with torch.cuda.stream(torch.cuda.Stream()), single() as communicator:
            weights, _, _, report, _ = train(communicator, name, {}, graphs=graphs)
            runs.append(weights)
    assert report.captured, report.reason
    assert all(map(torch.equal, *runs))
