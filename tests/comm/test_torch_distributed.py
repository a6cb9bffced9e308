"""Communicators over torch.distributed."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm import process_groups, torch_distributed
from paceline.comm.communicator import Communicator
from paceline.comm.process_groups import create_gloo, high_priority
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import PeerError
from paceline.measure import traffic
from paceline.strategies.ddp import Ddp
from tests.support import toy_replicas as toy
from tests.support.worker_pool import WorkerPool


def lose_rank_one(communicator: Communicator) -> str:
    communicator.barrier().wait()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if communicator.rank == 0:
            communicator.recv(torch.zeros(3), 1, "control").wait()
        else:
            communicator.all_reduce(torch.zeros(1000), "gradients").wait()
    except PeerError as error:
        return str(error)
    return "no error"


def test_killed_peer_is_an_error() -> None:
    with WorkerPool(3) as workers:
        # A timeout far beyond that of the pool, so that only the lost peer can end the operations.
        lost = workers.outcomes(3, lose_rank_one, fresh=True, timeout_seconds=1000.0)
    assert lost[1].died
    assert lost[0].value == "rank 0: recv from rank 1: the connection was closed"
    assert lost[2].value == "rank 2: all_reduce with ranks 0, 1: the connection was closed"


def default_group_is_untouched(communicator: Communicator) -> bool:
    communicator.all_reduce(torch.ones(3), "metrics").wait()
    return not dist.is_initialized()


def test_communicator_does_not_create_the_default_group(pool: WorkerPool) -> None:
    assert pool.run(2, default_group_is_untouched) == [True, True]


def listening_addresses(communicator: Communicator) -> set[str]:
    """Return the addresses on which this worker listens, including torch's default group."""
    assert isinstance(communicator, TorchCommunicator)
    communicator.default_process_group()
    return {
        str(connection.laddr.ip)
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_workers_listen_only_on_the_rendezvous_address(pool: WorkerPool) -> None:
    for addresses in pool.run(2, listening_addresses, fresh=True):
        assert addresses == {"127.0.0.1"}


def gradient_of_ddp(communicator: Communicator) -> list[float]:
    """Return the gradient and weights of the mean of `w * rank` over the workers."""
    assert isinstance(communicator, TorchCommunicator)
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(float(communicator.rank))
    wrapped = nn.parallel.DistributedDataParallel(
        model, process_group=communicator.default_process_group()
    )
    wrapped(torch.full((1, 3), float(communicator.rank))).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    return [*gradient.flatten().tolist(), *model.weight.flatten().tolist()]


def test_default_process_group_works_with_ddp(pool: WorkerPool) -> None:
    # The mean of the inputs 0, 1 and 2, and the weights of rank 0 on every rank.
    assert pool.run(3, gradient_of_ddp, fresh=True) == [[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]] * 3


def close_twice(communicator: Communicator) -> bool:
    assert isinstance(communicator, TorchCommunicator)
    communicator.default_process_group()
    communicator.close()
    communicator.close()
    return not dist.is_initialized()


def test_closing_destroys_the_default_group_and_can_be_repeated(pool: WorkerPool) -> None:
    assert pool.run(2, close_twice, fresh=True) == [True, True]


@pytest.fixture
def pair() -> Iterator[list[TorchCommunicator]]:
    """Two ranks in this process."""
    store = HashStore()

    def make(rank: int) -> TorchCommunicator:
        return TorchCommunicator(store, rank, 2, address="127.0.0.1", timeout_seconds=10.0)

    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(make, range(2)))
    yield ends
    for end in ends:
        end.close()


def test_concurrent_close_aborts_only_once(
    pair: list[TorchCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = []

    def abort(gloo: object, peers: object) -> None:
        aborted.append(gloo)
        if len(aborted) == 1:
            pair[0].close()

    monkeypatch.setattr(torch_distributed, "abort_gloo", abort)
    pair[0].close()
    assert len(aborted) == 1
    assert aborted[0] is not None


def test_operation_on_a_closed_communicator_is_an_error(pair: list[TorchCommunicator]) -> None:
    pair[0].close()
    with pytest.raises(PeerError, match="rank 0: send to rank 1: this communicator is closed"):
        pair[0].send(torch.ones(3), 1, "control")


def test_programming_error_is_not_reported_as_a_closed_communicator(
    pair: list[TorchCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair[0], "_gloo", SimpleNamespace())
    with pytest.raises(AttributeError):
        pair[0].send(torch.ones(3), 1, "control")


class CallerRecorder:
    """A process group and its handle that record the functions on the call stack."""

    def __init__(self) -> None:
        self.starting: list[str] = []
        self.waiting: list[str] = []

    def allreduce(self, _tensors: object) -> CallerRecorder:
        self.starting = [frame.name for frame in traceback.extract_stack()[:-1]]
        return self

    def wait(self) -> None:
        self.waiting = [frame.name for frame in traceback.extract_stack()[:-1]]


def test_all_reduce_calls_the_process_group_directly(
    pair: list[TorchCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, test = CallerRecorder(), "test_all_reduce_calls_the_process_group_directly"
    with monkeypatch.context() as patch:
        patch.setattr(pair[0], "_gloo", group)
        pair[0].all_reduce(torch.ones(3), "gradients").wait()
    assert group.starting[-2:] == [test, "all_reduce"]
    assert group.waiting[-3:] == [test, "wait", "_block"]


def transfers_on_gpu(communicator: Communicator, codec: str) -> int:
    """Return how many transfers of ddp the GPU times if each worker has its own GPU.

    The CPU stands in for that GPU.
    """
    assert isinstance(communicator, TorchCommunicator)
    spans: list[tuple[float, float]] = []

    def busy_seconds(of_kind: list[tuple[float, float]]) -> float:
        spans.extend(of_kind)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCommunicator, "gpu", torch.device("cpu"))
        patch.setattr(traffic, "busy_seconds", busy_seconds)
        strategy = Ddp(codec=codec)
        strategy.setup(toy.replica(communicator, toy.sgd()))
        toy.train(strategy, range(3))
        strategy.finish()
        communicator.traffic.settle()
    return len(spans)


@pytest.mark.parametrize(("codec", "steps"), [("none", 3), ("bf16", 0)])
def test_ddp_times_only_nccl_transfers(pool: WorkerPool, codec: str, steps: int) -> None:
    """With a codec, the communicator of the communication thread times the transfers."""
    assert pool.run(2, transfers_on_gpu, codec, fresh=True) == [steps, steps]


@pytest.mark.gpu
def test_tensors_on_a_shared_gpu_use_cpu_memory(pool: WorkerPool) -> None:
    assert pool.run(2, sum_on_gpu) == [[3.0] * 5] * 2


def sum_on_gpu(communicator: Communicator) -> list[float]:
    tensor = torch.full((5,), communicator.rank + 1.0, device="cuda:0")
    communicator.all_reduce(tensor, "gradients").wait()
    return tensor.tolist()


def policies_of_new_threads(start: Callable[[], object]) -> list[tuple[str, int, int]]:
    """Names, scheduling policies and nice values of the threads that `start` leaves running, in
    their order."""
    tasks = Path("/proc/self/task")
    known = {*tasks.iterdir()}
    kept = start()
    new = sorted({*tasks.iterdir()} - known, key=lambda task: int(task.name))
    policies = [
        (
            (task / "comm").read_text().strip(),
            os.sched_getscheduler(int(task.name)),
            os.getpriority(os.PRIO_PROCESS, int(task.name)),
        )
        for task in new
    ]
    del kept
    return policies


def policies_of_both_groups(communicator: Communicator) -> list[list[tuple[str, int, int]]]:
    """Of the threads of a communicator and of torch's default group."""
    assert isinstance(communicator, TorchCommunicator)
    return [
        policies_of_new_threads(start)
        for start in (communicator.dup, communicator.default_process_group)
    ]


def test_polling_threads_of_gloo_preempt_no_other_thread(pool: WorkerPool) -> None:
    for polling, *others in pool.run(2, policies_of_both_groups, fresh=True)[0]:
        # Gloo starts it first, and only new versions give it a name.
        assert polling[1] == os.SCHED_BATCH
        assert {policy for _, policy, _ in others} == {os.SCHED_OTHER}
        assert {niceness for *_, niceness in others} == {polling[2]}
        assert "gloo_tcp_loop" not in [name for name, *_ in others]


def test_a_polling_thread_without_a_name_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "POLLING_THREAD", "unknown")
    polling, *_ = policies_of_new_threads(lambda: create_gloo(HashStore(), 0, 1, "127.0.0.1", 5.0))
    assert polling[1] == os.SCHED_BATCH


def test_polling_threads_give_way_on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "is_loopback", lambda _: False)
    polling, *others = policies_of_new_threads(
        lambda: create_gloo(HashStore(), 0, 1, "127.0.0.1", 5.0)
    )
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert polling[2] == min(usual + process_groups.POLLING_NICENESS, 19)
    with high_priority():  # as far as this user may
        high = os.getpriority(os.PRIO_PROCESS, 0)
    assert {niceness for *_, niceness in others} == {high}


def test_a_polling_thread_with_another_policy_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_FIFO)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("the policy was changed"))
    assert create_gloo(HashStore(), 0, 1, "127.0.0.1", 5.0) is not None


@pytest.mark.root
def test_communication_threads_have_a_higher_priority() -> None:
    usual, seen = os.getpriority(os.PRIO_PROCESS, 0), []
    with high_priority():
        thread = Thread(target=lambda: seen.append(os.getpriority(os.PRIO_PROCESS, 0)))
        thread.start()
        thread.join()
    assert seen[0] < usual == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.root
@pytest.mark.parametrize(("address", "is_raised"), [("10.0.0.1", True), ("127.0.0.1", False)])
def test_messages_start_with_the_priority_of_gloo_threads(
    monkeypatch: pytest.MonkeyPatch, address: str, is_raised: bool
) -> None:
    usual, seen = os.getpriority(os.PRIO_PROCESS, 0), []

    def start(tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    group = SimpleNamespace(send=start, recv=start)
    monkeypatch.setattr(torch_distributed, "create_gloo", lambda *_: group)
    communicator = TorchCommunicator(HashStore(), 0, 2, address=address)
    communicator.send(torch.ones(1), 1, "gradients")
    communicator.recv(torch.ones(1), 1, "gradients")
    assert [priority < usual for priority in seen] == [is_raised, is_raised]
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def test_priority_is_unchanged_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with high_priority():
        assert os.getpriority(os.PRIO_PROCESS, 0) == usual
