"""Messages between GPUs, and setup of NCCL."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm import torch_distributed
from paceline.comm.algorithms import ring
from paceline.comm.communicator import Communicator, OperationContext
from paceline.comm.process_groups import create_nccl, start_nccl_messages
from paceline.comm.torch_distributed import NcclWork, TorchCommunicator
from paceline.measure.timeline import Timeline
from tests.comm.fake_nccl import GPU, FakeHandle, FakeNccl, FakeNetwork

WORLD_SIZE = 4
TIMEOUT_SECONDS = 10.0


@pytest.fixture
def run_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Communicator], object]], list[object]]:
    """Return a function that runs another one on every rank, in threads, with a fake NCCL."""
    network = FakeNetwork(WORLD_SIZE)

    def make(_store: object, rank: int, *_: object) -> FakeNccl:
        nccl = FakeNccl(network, rank)
        nccl.eager_connect_single_device(GPU)
        return nccl

    monkeypatch.setattr(torch_distributed, "create_nccl", make)

    def run(function: Callable[[Communicator], object]) -> list[object]:
        store = HashStore()

        def on_rank(rank: int) -> object:
            with TorchCommunicator(
                store,
                rank,
                WORLD_SIZE,
                address="127.0.0.1",
                gpu=GPU,
                timeout_seconds=TIMEOUT_SECONDS,
            ) as communicator:
                result = function(communicator)
                # `wait` of a stream-ordered operation does not block.
                communicator.synchronize()
                communicator.barrier().wait()
                return result

        with ThreadPoolExecutor(WORLD_SIZE) as threads:
            return list(threads.map(on_rank, range(WORLD_SIZE)))

    return run


@pytest.mark.parametrize("elements", [0, 1, WORLD_SIZE - 1, WORLD_SIZE, WORLD_SIZE + 1])
def test_ring_completes_with_fewer_elements_than_ranks(
    run_on_gpus: Callable[..., list[object]], elements: int
) -> None:
    def work(communicator: Communicator) -> None:
        gradient = torch.empty(elements, device=GPU)
        ring.Ring().all_reduce(communicator, gradient, "gradients")

    run_on_gpus(work)


def test_send_matches_the_receive_of_a_sendrecv(
    run_on_gpus: Callable[..., list[object]],
) -> None:
    """Rank 0 only sends, rank 3 only receives, and the ranks in between do both."""

    def work(communicator: Communicator) -> None:
        rank, tensor, arriving = communicator.rank, torch.empty(3, device=GPU), torch.empty(3)
        arriving = arriving.to(GPU)
        if rank == 0:
            communicator.send(tensor, 1, "control").wait()
        elif rank == WORLD_SIZE - 1:
            communicator.recv(arriving, rank - 1, "control").wait()
        else:
            communicator.sendrecv(tensor, rank + 1, arriving, rank - 1, "control").wait()

    run_on_gpus(work)


def test_memory_of_a_timed_operation_is_kept_until_the_caller_waits() -> None:
    """Like torch's, the handle releases its tensors as soon as any stream waits for it."""
    tensors = [torch.empty(3)]
    kept = weakref.ref(tensors[0])
    handle = SimpleNamespace(tensors=list(tensors))
    handle.wait = handle.tensors.clear
    context = OperationContext(0, "all_reduce with", (1,))
    work = NcclWork(handle, context, TIMEOUT_SECONDS, Timeline(), tensors)
    del tensors
    work.add_done_callback(lambda _: None)
    assert handle.tensors == []
    assert kept() is not None
    work.wait()
    assert kept() is None


def connected_pair() -> list[FakeNccl]:
    network = FakeNetwork(2)
    pair = [FakeNccl(network, rank) for rank in range(2)]
    for nccl in pair:
        nccl.eager_connect_single_device(GPU)
    return pair


def exchange(order: Sequence[str], nccl: FakeNccl, peer: int) -> list[FakeHandle]:
    """A send and a receive, each in its own group."""
    return [
        start_nccl_messages(nccl, **{half: (torch.empty(3, device=GPU), peer)}) for half in order
    ]


@pytest.mark.parametrize(
    ("first", "second", "finishes"),
    [
        (("send", "recv"), ("recv", "send"), True),
        (("send", "recv"), ("send", "recv"), False),
        (("recv", "send"), ("recv", "send"), False),
    ],
)
def test_two_ranks_that_send_to_each_other_start_in_opposite_orders(
    first: Sequence[str], second: Sequence[str], finishes: bool
) -> None:
    """The rule of `Communicator.send` on GPUs, as far as the fake implements it."""
    zero, one = connected_pair()
    handles = exchange(first, zero, 1) + exchange(second, one, 0)
    assert all(handle.is_completed() for handle in handles) == finishes


def test_error_in_a_group_is_not_hidden_by_ending_the_group() -> None:
    """The fake, like torch, does not end an empty group."""
    zero, _ = connected_pair()
    with pytest.raises(IndexError):
        start_nccl_messages(zero, recv=cast("Any", (torch.empty(3, device=GPU),)))


class _RecordedNccl:
    """Records the environment in each step in which NCCL reads it."""

    Options = SimpleNamespace
    interfaces: list[str | None]
    connected: list[torch.device]

    def __init__(self, *_: object) -> None:
        self._note()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._note()
        self.connected.append(device)

    def _note(self) -> None:
        self.interfaces.append(os.environ.get("NCCL_SOCKET_IFNAME"))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[_RecordedNccl]:
    class Nccl(_RecordedNccl):
        interfaces, connected = [], []

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    return Nccl


def test_nccl_listens_on_the_interface_of_the_rendezvous(
    recorded: type[_RecordedNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    create_nccl(HashStore(), 0, 1, "127.0.0.1", GPU, 5.0)
    assert recorded.interfaces == ["=lo", "=lo"]
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_nccl_interface_set_by_the_user_is_kept(
    recorded: type[_RecordedNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    create_nccl(HashStore(), 0, 1, "127.0.0.1", GPU, 5.0)
    assert recorded.interfaces == ["ib0", "ib0"]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_every_rank_creates_its_nccl_communicator_on_connect(
    recorded: type[_RecordedNccl],
) -> None:
    """Otherwise a rank without messages would not take part, and the others would wait for it."""
    create_nccl(HashStore(), 0, 1, "127.0.0.1", GPU, 5.0)
    assert recorded.connected == [GPU]


@pytest.fixture
def real_nccl() -> Any:
    nccl = create_nccl(HashStore(), 0, 1, "127.0.0.1", torch.device("cuda:0"), 30.0)
    yield nccl
    nccl.abort()


@pytest.mark.gpu
def test_message_to_self_arrives_through_real_nccl(real_nccl: Any) -> None:
    outgoing = torch.arange(10.0, device="cuda:0")
    incoming = torch.zeros_like(outgoing)
    handle = start_nccl_messages(real_nccl, send=(outgoing, 0), recv=(incoming, 0))
    handle.wait()
    torch.cuda.synchronize()
    assert incoming.tolist() == outgoing.tolist()
