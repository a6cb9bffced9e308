"""Contract of communicators, checked for every implementation with three ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.work import Work
from paceline.errors import PeerError
from paceline.measure.traffic import Traffic
from tests.support.rank_groups import RankGroup

DTYPES = (torch.bool, torch.bfloat16, torch.int16, torch.int64, torch.float32, torch.complex64)


def values_of(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(size) + 10 * rank).to(dtype)


def receives_what_was_sent(communicator: Communicator, make: Callable[[int], Tensor]) -> bool:
    """Send from rank 0 to both other ranks, which receive into tensors of the same layout."""
    if communicator.rank == 0:
        for peer in communicator.peers:
            communicator.send(make(0), peer, "control").wait()
        return True
    tensor = make(communicator.rank)
    communicator.recv(tensor, 0, "control").wait()
    return torch.equal(tensor, make(0))


def sends_any_dtype(communicator: Communicator) -> list[str]:
    return [
        str(dtype)
        for dtype in DTYPES
        if not receives_what_was_sent(communicator, partial(values_of, size=7, dtype=dtype))
    ]


def test_sends_any_dtype(three_ranks: RankGroup) -> None:
    assert three_ranks.run(sends_any_dtype) == [[], [], []]


def sends_any_shape(communicator: Communicator) -> list[str]:
    makes: dict[str, Callable[[int], Tensor]] = {
        "no elements": lambda rank: torch.full((0, 3), rank),
        "one number": lambda rank: torch.tensor(float(rank)),
        "a transposed matrix": lambda rank: values_of(rank, 6).view(2, 3).t(),
        "every second element": lambda rank: values_of(rank, 10)[::2],
        "channels last": lambda rank: (
            values_of(rank, 24).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
        ),
        "a parameter": lambda rank: torch.nn.Parameter(values_of(rank, 5)),
    }
    return [name for name, make in makes.items() if not receives_what_was_sent(communicator, make)]


def test_sends_any_shape_and_strides(three_ranks: RankGroup) -> None:
    assert three_ranks.run(sends_any_shape) == [[], [], []]


def receive_in_reverse(communicator: Communicator) -> list[float]:
    if communicator.rank == 0:
        works = [communicator.send(torch.full((3,), float(i)), 1, "control") for i in range(4)]
        for work in reversed(works):
            work.wait()
        return []
    if communicator.rank == 2:
        return []
    tensors = [torch.zeros(3) for _ in range(4)]
    works = [communicator.recv(tensor, 0, "control") for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


def test_messages_keep_their_order_for_any_order_of_waits(
    three_ranks: RankGroup,
) -> None:
    assert three_ranks.run(receive_in_reverse)[1] == [0.0, 1.0, 2.0, 3.0]


def poll_a_receive(communicator: Communicator) -> list[bool]:
    """Poll on rank 1 before and after rank 0 sends."""
    tensor, signal = torch.zeros(3), torch.zeros(1)
    if communicator.rank == 0:
        communicator.recv(signal, 1, "control").wait()
        communicator.send(tensor + 5, 1, "control").wait()
        return []
    if communicator.rank == 2:
        return []
    work = communicator.recv(tensor, 0, "control")
    return [*completed_around_a_signal(work, communicator), bool((tensor == 5).all())]


def test_receive_completes_when_its_message_arrives(three_ranks: RankGroup) -> None:
    assert three_ranks.run(poll_a_receive)[1] == [False, True, True]


def poll_a_collective(communicator: Communicator) -> list[bool]:
    """Poll before rank 0 joins, and after."""
    tensor, signal = torch.ones(3), torch.zeros(1)
    if communicator.rank == 0:
        for peer in communicator.peers:
            communicator.recv(signal, peer, "control").wait()
        communicator.all_reduce(tensor, "metrics").wait()
        return [False, True, bool((tensor == 3).all())]
    work = communicator.all_reduce(tensor, "metrics")
    return [*completed_around_a_signal(work, communicator), bool((tensor == 3).all())]


def completed_around_a_signal(work: Work, communicator: Communicator) -> tuple[bool, bool]:
    """Whether it is complete before rank 0 is signaled to join it, and when polled afterwards."""
    before = work.is_completed()
    communicator.send(torch.zeros(1), 0, "control").wait()
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    after = work.is_completed()
    work.wait()
    return before, after


def test_collective_progresses_while_the_caller_does_other_work(three_ranks: RankGroup) -> None:
    assert three_ranks.run(poll_a_collective) == [[False, True, True]] * 3


def broadcast_from_each(communicator: Communicator) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for root in range(3):
            matrix = values_of(communicator.rank, 6, dtype).view(2, 3).t()
            communicator.broadcast(matrix, root, "parameters").wait()
            if not torch.equal(matrix, values_of(root, 6, dtype).view(2, 3).t()):
                wrong.append(f"{dtype} from {root}")
    return wrong


def test_broadcast_copies_the_roots_tensor_to_all_ranks(three_ranks: RankGroup) -> None:
    assert three_ranks.run(broadcast_from_each) == [[], [], []]


def gather_at_one(communicator: Communicator) -> list[list[float]] | None:
    """Gather tensors of different sizes."""
    rank = communicator.rank
    parts = [torch.zeros(size + 1) for size in range(3)] if rank == 1 else None
    communicator.gather(values_of(rank, rank + 1), parts, 1, "metrics").wait()
    return None if parts is None else [part.tolist() for part in parts]


def test_gather_collects_tensors_in_rank_order(three_ranks: RankGroup) -> None:
    expected = [[0.0], [10.0, 11.0], [20.0, 21.0, 22.0]]
    assert three_ranks.run(gather_at_one) == [None, expected, None]


def scatter_from_one(communicator: Communicator) -> list[float]:
    rank = communicator.rank
    tensor = torch.zeros(rank + 1)
    parts = [values_of(peer, peer + 1) for peer in range(3)] if rank == 1 else None
    communicator.scatter(tensor, parts, 1, "parameters").wait()
    return tensor.tolist()


def test_scatter_distributes_the_roots_parts(three_ranks: RankGroup) -> None:
    assert three_ranks.run(scatter_from_one) == [[0.0], [10.0, 11.0], [20.0, 21.0, 22.0]]


def reduce_scatter_chunks(communicator: Communicator, size: int) -> list[float]:
    tensor = values_of(communicator.rank, size)
    communicator.reduce_scatter(tensor, "gradients").wait()
    bounds = {6: [0, 2, 4, 6], 7: [0, 3, 5, 7], 2: [0, 1, 2, 2]}[size]
    return tensor[bounds[communicator.rank] : bounds[communicator.rank + 1]].tolist()


@pytest.mark.parametrize("size", [6, 7, 2])
def test_reduce_scatter_sums_the_chunk_of_each_rank(three_ranks: RankGroup, size: int) -> None:
    chunks = three_ranks.run(reduce_scatter_chunks, size)
    assert [value for part in chunks for value in part] == [30.0 + 3 * i for i in range(size)]


def all_gather_chunks(communicator: Communicator, size: int, dtype: torch.dtype) -> bool:
    bounds = {6: [0, 2, 4, 6], 7: [0, 3, 5, 7], 2: [0, 1, 2, 2]}[size]
    own = slice(bounds[communicator.rank], bounds[communicator.rank + 1])
    tensor = torch.zeros(size, dtype=dtype)
    tensor[own] = values_of(4, size, dtype)[own]
    communicator.all_gather(tensor, "parameters").wait()
    return torch.equal(tensor, values_of(4, size, dtype))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float32])
@pytest.mark.parametrize("size", [6, 7, 2])
def test_all_gather_collects_the_chunks_of_all_ranks(
    three_ranks: RankGroup, size: int, dtype: torch.dtype
) -> None:
    assert three_ranks.run(all_gather_chunks, size, dtype) == [True] * 3


def all_reduce_strided(communicator: Communicator) -> list[str]:
    wrong = []
    for dtype in (torch.int16, torch.int64, torch.bfloat16, torch.complex64):
        matrix = values_of(communicator.rank, 6, dtype).view(2, 3).t()
        communicator.all_reduce(matrix, "gradients").wait()
        if not torch.equal(matrix, (torch.arange(6) * 3 + 30).to(dtype).view(2, 3).t()):
            wrong.append(str(dtype))
    return wrong


def test_all_reduce_supports_any_dtype_and_strides(three_ranks: RankGroup) -> None:
    assert three_ranks.run(all_reduce_strided) == [[], [], []]


def all_reduce_bools(communicator: Communicator) -> list[bool]:
    flags = torch.tensor([communicator.rank == 1, False, True])
    communicator.all_reduce(flags, "control").wait()
    return flags.tolist()


def test_sum_of_bools_is_a_logical_or(three_ranks: RankGroup) -> None:
    assert three_ranks.run(all_reduce_bools) == [[True, False, True]] * 3


def arrive_late(communicator: Communicator) -> tuple[float, float]:
    """Return when this rank started the barrier and when it completed."""
    time.sleep(0.1 * communicator.rank)
    arrived = time.monotonic()
    communicator.barrier().wait()
    return arrived, time.monotonic()


def test_barrier_waits_for_all_ranks(three_ranks: RankGroup) -> None:
    times = three_ranks.run(arrive_late)
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def send_on_two(communicator: Communicator) -> list[float]:
    """Rank 0 sends on the communicator first; rank 1 receives on the duplicate first."""
    duplicate = communicator.dup()
    try:
        if communicator.rank == 0:
            first = communicator.send(torch.tensor([1.0]), 1, "control")
            duplicate.send(torch.tensor([2.0]), 1, "control").wait()
            first.wait()
            return []
        if communicator.rank == 2:
            return []
        on_duplicate, on_original = torch.zeros(1), torch.zeros(1)
        duplicate.recv(on_duplicate, 0, "control").wait()
        communicator.recv(on_original, 0, "control").wait()
        return [float(on_duplicate), float(on_original)]
    finally:
        duplicate.close()


def test_messages_of_a_duplicate_do_not_mix_with_the_originals(three_ranks: RankGroup) -> None:
    assert three_ranks.run(send_on_two)[1] == [2.0, 1.0]


def count_kinds(communicator: Communicator) -> dict[str, tuple[int, int, int]]:
    communicator.traffic.restore(Traffic().to_dict())
    if communicator.rank == 0:
        communicator.send(torch.zeros(10), 1, "parameters").wait()
        communicator.send(torch.zeros(3, dtype=torch.bool), 1, "metrics").wait()
        communicator.recv(torch.zeros(5, dtype=torch.float64), 1, "metrics").wait()
    elif communicator.rank == 1:
        communicator.recv(torch.zeros(10), 0, "parameters").wait()
        communicator.recv(torch.zeros(3, dtype=torch.bool), 0, "metrics").wait()
        communicator.send(torch.zeros(5, dtype=torch.float64), 0, "metrics").wait()
    return {
        kind: (count.bytes_sent, count.bytes_received, count.messages)
        for kind, count in communicator.traffic.counts.items()
        if (count.bytes_sent, count.bytes_received, count.messages) != (0, 0, 0)
    }


def test_transfers_are_counted_by_kind(three_ranks: RankGroup) -> None:
    assert three_ranks.run(count_kinds) == [
        {"parameters": (40, 0, 1), "metrics": (3, 40, 1)},
        {"parameters": (0, 40, 0), "metrics": (40, 3, 1)},
        {},
    ]


def count_collectives(communicator: Communicator) -> list[tuple[int, int]]:
    """Count collectives of six elements of four bytes: two elements per chunk."""
    tensor = torch.zeros(6)
    counted = []
    starts: list[Callable[[], Work]] = [
        lambda: communicator.broadcast(tensor, 1, "parameters"),
        lambda: communicator.reduce_scatter(tensor, "parameters"),
        lambda: communicator.all_gather(tensor, "parameters"),
        lambda: communicator.all_reduce(tensor, "parameters"),
    ]
    for start in starts:
        communicator.traffic.restore(Traffic().to_dict())
        start().wait()
        count = communicator.traffic.counts["parameters"]
        counted.append((count.bytes_sent, count.bytes_received))
    return counted


def test_all_communicators_count_collectives_equally(three_ranks: RankGroup) -> None:
    # In the tree, rank 1 sends a copy to ranks 2 and 0. Each half of a ring of three ranks sends
    # two chunks of 8 bytes.
    rings = [(16, 16), (16, 16), (32, 32)]
    assert three_ranks.run(count_collectives) == [
        [(0, 24), *rings],
        [(48, 0), *rings],
        [(0, 24), *rings],
    ]


def expect_silence(communicator: Communicator, operation: str) -> str:
    """Rank 0 stays silent but connected until the other ranks time out."""
    if communicator.rank == 0:
        time.sleep(1.5)
        return ""
    try:
        if operation == "recv":
            communicator.recv(torch.zeros(3), 0, "control").wait()
        else:
            communicator.all_reduce(torch.zeros(3), "control").wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_receive_from_a_silent_peer_is_a_one_line_error_that_names_it(
    three_ranks: RankGroup,
) -> None:
    errors = three_ranks.run_fresh(expect_silence, "recv", timeout_seconds=0.4)
    assert errors[1] == "rank 1: recv from rank 0: no response within the timeout of 0.4 s"
    assert errors[2] == "rank 2: recv from rank 0: no response within the timeout of 0.4 s"


def test_collective_with_a_silent_peer_is_a_one_line_error(three_ranks: RankGroup) -> None:
    errors = three_ranks.run_fresh(expect_silence, "all_reduce", timeout_seconds=0.4)
    for rank in (1, 2):
        assert errors[rank].startswith(f"rank {rank}: ")
        assert "no response within the timeout of 0.4 s" in errors[rank] or "closed" in errors[rank]
        assert "\n" not in errors[rank]
    assert any("no response" in line for line in errors)


def expect_departure(communicator: Communicator) -> str:
    if communicator.rank == 0:
        communicator.close()
        return ""
    try:
        communicator.recv(torch.zeros(3), 0, "control").wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_peer_that_closes_is_detected_immediately(three_ranks: RankGroup) -> None:
    errors = three_ranks.run_fresh(expect_departure, timeout_seconds=20.0)
    assert errors[1] == "rank 1: recv from rank 0: the connection was closed"
    assert errors[2] == "rank 2: recv from rank 0: the connection was closed"


def misuse(communicator: Communicator) -> list[str]:
    errors = []
    calls: list[Callable[[], Work]] = [
        lambda: communicator.send(torch.zeros(1), communicator.rank, "control"),
        lambda: communicator.recv(torch.zeros(1), 3, "control"),
        lambda: communicator.gather(torch.zeros(1), [], communicator.rank, "control"),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_invalid_arguments_are_rejected_before_sending(three_ranks: RankGroup) -> None:
    assert three_ranks.run(misuse)[1] == [
        "invalid peer 1 for rank 1 of 3",
        "invalid peer 3 for rank 1 of 3",
        "the root needs 3 parts, one per rank",
    ]
