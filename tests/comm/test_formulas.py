"""Formulas of traffic and cost."""

from __future__ import annotations

import pytest
import torch

from paceline.comm import in_process
from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.algorithms.base import Algorithm
from paceline.comm.buffers import chunk, chunk_elements
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Network

WORLD_SIZES = range(1, 18)
ELEMENTS = (0, 1, 7, 1009)
EVEN_BYTES = 4 * 720_720
"""A multiple of every number up to 16, so that no formula rounds."""

all_algorithms = pytest.mark.parametrize("name", ALGORITHMS.names())


def load(name: str) -> Algorithm:
    return ALGORITHMS.load(name)()


@all_algorithms
def test_total_bytes_sent_equal_total_bytes_received(name: str) -> None:
    for world_size in WORLD_SIZES:
        for elements in ELEMENTS:
            ranks = range(world_size)
            sent = sum(load(name).bytes_sent(rank, world_size, elements, 4) for rank in ranks)
            received = sum(
                load(name).bytes_received(rank, world_size, elements, 4) for rank in ranks
            )
            assert sent == received, (world_size, elements)


@all_algorithms
def test_single_worker_costs_nothing(name: str) -> None:
    cost = load(name).cost(1, EVEN_BYTES, Network(1.0, 1.0, 1.0))
    assert (cost.seconds, cost.bytes_sent, cost.messages) == (0.0, 0.0, 0)
    assert load(name).bytes_sent(0, 1, 100, 4) == 0


@all_algorithms
def test_cost_reports_the_bytes_of_the_busiest_rank(name: str) -> None:
    for world_size in range(1, 17):
        busiest = max(
            load(name).bytes_sent(rank, world_size, EVEN_BYTES // 4, 4)
            for rank in range(world_size)
        )
        cost = load(name).cost(world_size, EVEN_BYTES, Network(1.0, 1.0))
        assert cost.bytes_sent == pytest.approx(busiest, rel=1e-12), world_size


@all_algorithms
@pytest.mark.parametrize("world_size", range(1, 9))
def test_cost_reports_the_messages_of_the_busiest_rank(name: str, world_size: int) -> None:
    def messages(communicator: Communicator) -> int:
        load(name).all_reduce(communicator, torch.zeros(64), "gradients")
        return communicator.traffic.counts["gradients"].messages

    busiest = max(in_process.run(world_size, messages))
    assert load(name).cost(world_size, 256, Network(1.0, 1.0)).messages == busiest


def test_ring_sends_all_chunks_but_one_twice() -> None:
    for world_size in range(2, 9):
        elements = 840  # a multiple of all of them
        for rank in range(world_size):
            sent = load("ring").bytes_sent(rank, world_size, elements, 4)
            assert sent * world_size == 2 * (world_size - 1) * elements * 4


def test_root_receives_the_tensors_of_all_other_ranks() -> None:
    assert load("root").bytes_received(0, 5, 1009, 4) == 4 * 1009 * 4
    assert load("root").bytes_received(3, 5, 1009, 4) == 1009 * 4


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # Four workers, 8 bytes; 1 s per message, per byte moved and per byte summed.
        ("root", 2 * (1 + 3 * 8) + 3 * 8),
        ("tree", 2 * (1 + 8 + 8) + 2 * (1 + 8)),
        ("ring", 3 * (1 + 2 + 2) + 3 * (1 + 2)),
        ("halving_doubling", (1 + 4 + 4) + (1 + 2 + 2) + (1 + 2) + (1 + 4)),
    ],
)
def test_cost_of_four_workers(name: str, seconds: float) -> None:
    assert load(name).cost(4, 8, Network(1.0, 1.0, 1.0)).seconds == pytest.approx(seconds)


def test_extra_worker_beyond_a_power_of_two_costs_two_more_transfers() -> None:
    network = Network(1.0, 1.0, 1.0)
    four, five = (load("halving_doubling").cost(size, 8, network).seconds for size in (4, 5))
    assert five - four == pytest.approx((1 + 8 + 8) + (1 + 8))


def test_fewest_steps_win_for_small_and_fewest_bytes_for_large_tensors() -> None:
    ethernet = Network(latency_seconds=50e-6, bandwidth_bytes_per_second=125e6)
    small, large = (
        {name: load(name).cost(15, size, ethernet).seconds for name in ("root", "tree", "ring")}
        for size in (64, 64e6)
    )
    assert small["tree"] < small["ring"]
    assert large["ring"] < large["tree"] < large["root"]


def test_chunks_cover_the_tensor_and_differ_by_at_most_one_element() -> None:
    for elements in ELEMENTS:
        for chunks in WORLD_SIZES:
            flat = torch.arange(elements)
            parts = [chunk(flat, chunks, index) for index in range(chunks)]
            assert torch.equal(torch.cat(parts), flat)
            sizes = [part.numel() for part in parts]
            assert sizes == [chunk_elements(elements, chunks, index) for index in range(chunks)]
            assert max(sizes) - min(sizes) <= 1
