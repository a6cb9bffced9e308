"""Traffic of a step matches the formula of the algorithm exactly, by kind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.contract.exact import ExactModel
from tests.strategies.contract.harness import SMALL_BUCKETS, Task, run_ranks, train_exactly
from tests.support.worker_pool import WorkerPool

ELEMENTS = [weight.numel() for weight in ExactModel().parameters() if weight.requires_grad]
GRADIENT_BYTES = 4 * sum(ELEMENTS)
MODEL_BYTES = 4 * sum(weight.numel() for weight in ExactModel().parameters())
BUFFER_BYTES = 4 * sum(buffer.numel() for buffer in ExactModel().buffers())
STEPS = 3

RING = ("allreduce", "ring", "overlap", "ddp")
WORLD_SIZES = (2, 3, 4)


def traffic(pool: WorkerPool, name: str, world_size: int) -> list[dict[str, Any]]:
    """Return the traffic of each worker over a training."""
    trained = run_ranks(pool, world_size, train_exactly, name, Task(batches=(16,) * STEPS))
    return [worker.traffic for worker in trained]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", RING)
def test_ring_sends_all_chunks_but_one_twice(pool: WorkerPool, name: str, world_size: int) -> None:
    """All workers send 2 (P - 1) times the gradient, in nearly equal shares."""
    counts = [each["gradients"] for each in traffic(pool, name, world_size)]
    per_worker = STEPS * 2 * (world_size - 1) * GRADIENT_BYTES
    assert sum(each["bytes_sent"] for each in counts) == per_worker
    assert sum(each["bytes_received"] for each in counts) == per_worker
    # Chunks differ by one element, twice per tensor or bucket.
    slack = STEPS * 2 * 4 * len(ELEMENTS)
    for each in counts:
        assert abs(each["bytes_sent"] - per_worker / world_size) <= slack


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shared_weights_publish_each_gradient_once(pool: WorkerPool, world_size: int) -> None:
    """Rank 0 updates a small model: the others publish their gradients and receive nothing."""
    first, *others = (each["gradients"] for each in traffic(pool, "shared", world_size))
    own = STEPS * GRADIENT_BYTES
    assert (first["bytes_sent"], first["bytes_received"]) == (0, own * (world_size - 1))
    for each in others:
        assert (each["bytes_sent"], each["bytes_received"]) == (own, 0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_root_receives_and_sends_all_gradients(pool: WorkerPool, world_size: int) -> None:
    first, *others = (each["gradients"] for each in traffic(pool, "gather_scatter", world_size))
    own = STEPS * GRADIENT_BYTES
    assert (first["bytes_sent"], first["bytes_received"]) == 2 * (own * (world_size - 1),)
    for each in others:
        assert (each["bytes_sent"], each["bytes_received"]) == (own, own)
    # Empty tensors are not sent.
    assert first["messages"] == STEPS * (world_size - 1) * sum(size > 0 for size in ELEMENTS)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tree_sends_gradients_up_once_and_down_once(pool: WorkerPool, world_size: int) -> None:
    counts = [each["gradients"] for each in traffic(pool, "tree", world_size)]
    total = sum(each["bytes_sent"] for each in counts)
    assert total == STEPS * 2 * (world_size - 1) * GRADIENT_BYTES


@pytest.mark.parametrize("world_size", [2, 4])
def test_halving_and_doubling_sends_as_little_as_a_ring(pool: WorkerPool, world_size: int) -> None:
    for each in traffic(pool, "halving_doubling", world_size):
        expected = STEPS * 2 * (world_size - 1) / world_size * GRADIENT_BYTES
        # Halves of an odd number of elements differ by one in each round.
        assert abs(each["gradients"]["bytes_sent"] - expected) <= STEPS * 2 * 2 * 4


@pytest.mark.parametrize("name", ["gather_scatter", *RING, "tree", "halving_doubling"])
def test_initial_weights_and_buffers_are_counted_separately(pool: WorkerPool, name: str) -> None:
    """Every rank except 0 receives the model once in a broadcast."""
    counts = traffic(pool, name, 3)
    for kind, size in (("parameters", MODEL_BYTES), ("buffers", BUFFER_BYTES)):
        received = [each[kind]["bytes_received"] for each in counts]
        assert received == [0, size, size], kind
        assert sum(each[kind]["bytes_sent"] for each in counts) == 2 * size, kind
    assert all(each["metrics"]["bytes_sent"] == 0 for each in counts)


def test_one_worker_sends_nothing(pool: WorkerPool) -> None:
    for name in (*RING, "gather_scatter", *SMALL_BUCKETS):
        [counts] = traffic(pool, name, 1)
        for kind, each in counts.items():
            assert not each["bytes_sent"], f"{name} sent {kind}"
