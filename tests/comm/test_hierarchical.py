"""Hierarchical communicators, on two nodes with two ranks each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm import hierarchical
from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.comm.hierarchical import HierarchicalCommunicator, split_by_node
from paceline.comm.shm.communicator import SharedMemoryCommunicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.comm.work import Work
from paceline.errors import PeerError
from tests.support.worker_pool import WorkerPool

LAYOUTS = ([0, 0, 1, 1], [1, 0, 1, 0])
"""Node of each rank: adjacent ranks, and alternating ranks."""
TENSORS = ((1, torch.bool), (3, torch.int16), (8, torch.float32), (1009, torch.bfloat16))


def connect(communicator: Communicator, nodes: list[int]) -> Communicator:
    return hierarchical.connect(communicator, nodes[communicator.rank])


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(size) * 3 + rank) % 5).to(dtype)


def wrong_collectives(communicator: Communicator) -> list[str]:
    wrong = []
    for nodes in LAYOUTS:
        with connect(communicator, nodes) as two_level:
            for size, dtype in TENSORS:
                wrong += [
                    f"{nodes} {size} {dtype}: {name}" for name in check(two_level, size, dtype)
                ]
    return wrong


def check(two_level: Communicator, size: int, dtype: torch.dtype) -> list[str]:
    """Return the collectives whose result is wrong."""
    rank, wrong = two_level.rank, []
    inputs = [values(each, size, dtype) for each in range(4)]
    total = torch.stack(inputs).any(0) if dtype == torch.bool else sum(inputs)
    assert isinstance(total, Tensor)

    scattered = inputs[rank].clone()
    two_level.reduce_scatter(scattered, "gradients").wait()
    if not torch.equal(chunk(scattered, 4, rank), chunk(total, 4, rank)):
        wrong.append("reduce_scatter")

    gathered = torch.zeros(size, dtype=dtype)
    chunk(gathered, 4, rank).copy_(chunk(total, 4, rank))
    two_level.all_gather(gathered, "gradients").wait()
    if not torch.equal(gathered, total):
        wrong.append("all_gather")

    for root in range(4):
        received = inputs[rank].clone()
        two_level.broadcast(received, root, "gradients").wait()
        if not torch.equal(received, inputs[root]):
            wrong.append(f"broadcast from {root}")
    return wrong


def test_two_level_collectives_are_correct(pool: WorkerPool) -> None:
    assert pool.run(4, wrong_collectives) == [[]] * 4


def bytes_by_level(communicator: Communicator) -> dict[str, list[int]]:
    """Return the bytes sent across and within nodes by each collective of 1000 elements."""
    counted = {}
    with connect(communicator, [0, 0, 1, 1]) as two_level:
        assert isinstance(two_level, HierarchicalCommunicator)
        assert two_level.intra_node is not None
        tensor = torch.zeros(1000)
        for name, collective in (
            ("all_reduce", two_level.all_reduce),
            ("reduce_scatter", two_level.reduce_scatter),
            ("all_gather", two_level.all_gather),
        ):
            levels = (two_level.network.traffic, two_level.intra_node.traffic)
            before = [level.counts["gradients"].bytes_sent for level in levels]
            collective(tensor, "gradients").wait()
            after = [level.counts["gradients"].bytes_sent for level in levels]
            counted[name] = [now - then for now, then in zip(after, before, strict=True)]
    return counted


def test_each_byte_crosses_nodes_once_and_ranks_share_the_load(pool: WorkerPool) -> None:
    # Each rank transfers half of the 4000 bytes, and each half of a ring of two nodes half of that.
    expected = {"all_reduce": [2000, 4000], "reduce_scatter": [1000, 2000]}
    expected["all_gather"] = expected["reduce_scatter"]
    assert pool.run(4, bytes_by_level) == [expected] * 4


def communicator_types(communicator: Communicator) -> list[str]:
    kinds = []
    for nodes in ([7, 7], [0, 1]):
        with connect(communicator, nodes) as two_level:
            kinds.append(type(two_level).__name__)
    return kinds


def test_one_node_uses_shared_memory_and_single_rank_nodes_the_network(pool: WorkerPool) -> None:
    expected = [SharedMemoryCommunicator.__name__, TorchCommunicator.__name__]
    assert pool.run(2, communicator_types) == [expected] * 2


LARGE = 2**18
"""Elements: more than fit into the slots of a channel."""


def wait_for_another_node(communicator: Communicator) -> float:
    """Rank 0 waits for rank 2 before it waits for its send to rank 1.

    Rank 2 answers only once rank 1 has received everything.
    """
    with connect(communicator, [0, 0, 1, 1]) as two_level:
        tensor, signal = torch.full((LARGE,), float(two_level.rank)), torch.zeros(1)
        if two_level.rank == 0:
            sending = two_level.send(tensor, 1, "control")
            two_level.recv(signal, 2, "control").wait()
            two_level.all_reduce(signal, "control").wait()
            sending.wait()
            return float(signal)
        if two_level.rank == 1:
            two_level.recv(tensor, 0, "control").wait()
            two_level.send(tensor[:1] + 5, 2, "control").wait()
        if two_level.rank == 2:
            two_level.recv(signal, 1, "control").wait()
            two_level.send(signal, 0, "control").wait()
        two_level.all_reduce(signal, "control").wait()
        return float(signal)


def test_message_within_a_node_progresses_while_its_sender_waits_for_another_node(
    pool: WorkerPool,
) -> None:
    assert pool.run(4, wait_for_another_node) == [10.0] * 4


def errors_on_rank_three(communicator: Communicator) -> list[str]:
    """Return the errors on rank 3, local rank 1 of its node, after all other ranks close."""
    errors = []
    levels = split_by_node(communicator, communicator.rank // 2)
    with connect(communicator, [0, 0, 1, 1]) as two_level:
        communicator.barrier().wait()
        if communicator.rank < 3:
            levels.close()
            two_level.close()
        else:
            starts: list[Callable[[], Work]] = [
                lambda: levels.intra_node.barrier(),
                lambda: levels.inter_node.recv(torch.zeros(1), 0, "control"),
                lambda: two_level.recv(torch.zeros(1), 2, "control"),
            ]
            for start in starts:
                try:
                    start().wait()
                except PeerError as error:
                    errors.append(str(error))
        communicator.barrier().wait()
    return errors


def test_errors_name_global_ranks(pool: WorkerPool) -> None:
    outcome = pool.run(4, errors_on_rank_three, fresh=True)
    assert outcome[3] == [
        "rank 3: barrier with rank 2: the connection was closed",
        "rank 3: recv from rank 1: the connection was closed",
        "rank 3: recv from rank 2: the connection was closed",
    ]
