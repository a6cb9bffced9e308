"""Measurement of communication that overlaps the backward pass."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm import process_groups
from paceline.comm.communicator import Communicator, OperationContext
from paceline.comm.torch_distributed import NcclWork, TorchCommunicator
from paceline.measure import timeline as timeline_module
from paceline.measure.phase_clock import clock_for
from paceline.measure.timeline import GpuTimeline, Moment, Timeline, busy_seconds, timeline_of
from paceline.measure.traffic import Traffic
from paceline.strategies import create_strategy
from paceline.strategies.ddp import Ddp
from paceline.strategies.exchange_meter import ExchangeMeter
from paceline.strategies.replica import Replica
from tests.support import odd_shapes as odd
from tests.support import toy_replicas as toy
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


@pytest.mark.parametrize(
    ("spans", "until", "seconds"),
    [
        ([], math.inf, 0.0),
        ([(1.0, 3.0)], math.inf, 2.0),
        ([(1.0, 3.0), (2.0, 5.0)], math.inf, 4.0),
        ([(2.0, 3.0), (0.0, 9.0)], math.inf, 9.0),
        ([(1.0, 2.0), (4.0, 6.0)], math.inf, 3.0),
        ([(1.0, 2.0), (4.0, 6.0)], 5.0, 2.0),
        ([(4.0, 6.0)], 4.0, 0.0),
        ([(4.0, 6.0), (7.0, 8.0)], 3.0, 0.0),
    ],
)
def test_overlapping_transfers_are_counted_once(
    spans: list[tuple[float, float]], until: float, seconds: float
) -> None:
    assert busy_seconds(spans, until) == seconds


class FakeMark:
    """A mark of a GPU whose clock is 1000 s ahead of the program."""

    def __init__(self, at: float, *, is_passed: bool = True) -> None:
        self.gpu_seconds = at + 1000.0
        self.is_passed = is_passed

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: Self, /) -> float:
        return (end_event.gpu_seconds - self.gpu_seconds) * 1000


class FakeStreams:
    """Records marks at given times, and anchors now."""

    def __init__(self, moments: Iterator[float], now: list[float]) -> None:
        self._moments, self._now = moments, now

    def record(self) -> FakeMark:
        return FakeMark(next(self._moments))

    def record_behind(self, wait: Callable[[], object]) -> FakeMark:
        wait()
        return self.record()

    def join(self) -> None:
        return

    def record_anchor(self) -> FakeMark:
        return FakeMark(self._now[0])


def test_gpu_marks_are_converted_to_perf_counter_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, marks = [60.0], iter([40.0, 59.0, 80.0])
    monkeypatch.setattr(timeline_module, "perf_counter", lambda: now[0])
    timeline = GpuTimeline(FakeStreams(marks, now))
    early, late, after = (timeline.mark() for _ in range(3))
    assert [timeline.seconds(early), timeline.seconds(late)] == [40.0, 59.0]
    now[0] = 90.0
    assert timeline.seconds(after) == 80.0
    assert timeline.seconds(12.5) == 12.5


class ScriptedTimeline(Timeline):
    """A GPU that passes its marks at given times, once a test allows it."""

    def __init__(self, moments: list[float]) -> None:
        self._moments = iter(moments)
        self.marks: list[FakeMark] = []

    def mark(self) -> Moment:
        self.marks.append(FakeMark(next(self._moments), is_passed=False))
        return self.marks[-1]

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, FakeMark)
        return moment.gpu_seconds - 1000.0


class EnqueuedHandle:
    """A handle like that of NCCL: its future completes on submission."""

    def __init__(self, result: list[Tensor]) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return


def test_nccl_collective_completes_at_a_mark_of_the_gpu() -> None:
    """The mark is known before the GPU has passed it, and all callbacks get the same one."""
    moments: list[Moment] = []
    operation = OperationContext(0, "all_reduce with", (1,))
    timeline = ScriptedTimeline([17.0])
    work = NcclWork(EnqueuedHandle([]), operation, 5.0, timeline)
    work.add_done_callback(moments.append)
    work.wait()
    work.add_done_callback(moments.append)
    assert moments == timeline.marks * 2
    assert timeline.seconds(moments[0]) == 17.0


class EnqueuingGroup:
    """A process group that reduces with gloo and looks like NCCL."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, tensors: list[Tensor]) -> EnqueuedHandle:
        self._group.allreduce(tensors).wait()
        return EnqueuedHandle(tensors)


THREE_STEPS = [
    *(1.0, 2.0),  # DDP builds its buckets after the first step, which has one
    *(10.0, 13.0, 14.0, 16.0),  # a bucket from 10 to 13 s, the last one from 14 to 16 s
    *(20.0, 26.0, 23.0, 24.0),  # the last bucket is ready at 23 s, the first ends at 26 s
]


def ddp_over_nccl(communicator: Communicator) -> dict[str, Any]:
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    replica = odd.build(communicator, toy.sgd(), layers)
    strategy = Ddp(bucket_mib=1e-6)
    strategy.setup(replica)
    strategy._uses_nccl = True
    strategy._timeline = ScriptedTimeline(THREE_STEPS)
    strategy._meter = ExchangeMeter(replica, strategy._timeline)
    strategy._group = EnqueuingGroup(strategy._group)
    noted = []
    for _ in range(3):
        strategy.backward(replica.forward(torch.ones(1, 4)).sum())
        strategy.step()
        noted.append(len(replica.exposed.began))
        for mark in strategy._timeline.marks:
            mark.is_passed = True
    strategy.finish()
    return {
        "noted": [*noted, len(replica.exposed.began)],
        "exposed": [*replica.exposed.began, *replica.exposed.ended],
        "hidden": replica.hidden_exchange_seconds,
        "exchange": replica.clock.seconds["exchange"],
        "under way": communicator.traffic.to_dict()["gradients"]["seconds"],
    }


def test_ddp_over_nccl_measures_gpu_time(pool: WorkerPool) -> None:
    for account in pool.run(2, ddp_over_nccl, fresh=True):
        # The first step after which the GPU has passed the marks of a step accounts for it.
        assert account["noted"] == [0, 1, 2, 3]
        assert account["exposed"] == [1.0, 14.0, 23.0, 2.0, 16.0, 26.0]
        assert account["hidden"] == (13 - 10) + (23 - 20)
        assert account["exchange"] == pytest.approx((2 - 1) + (16 - 14) + (26 - 23))
        assert account["under way"] == (2 - 1) + (13 - 10) + (16 - 14) + (26 - 20)


class GatedHandle:
    """Starts an all-reduce that ends before the backward pass continues."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = self._handle.get_future()
        self._handle.wait()
        return future


class GatedGroup:
    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, tensors: list[Tensor]) -> GatedHandle:
        return GatedHandle(self._group.allreduce(tensors))


def ddp_over_gloo(communicator: Communicator) -> tuple[float, float]:
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    replica = odd.build(communicator, toy.sgd(), layers)
    strategy = Ddp(bucket_mib=1e-6)
    strategy.setup(replica)
    # Each all-reduce ends before the next gradient is ready, so all but the last overlap.
    strategy._group = GatedGroup(strategy._group)
    for _ in range(2):
        strategy.backward(replica.forward(torch.ones(1, 4)).sum())
        strategy.step()
    strategy.finish()
    return replica.hidden_exchange_seconds, replica.clock.seconds["exchange"]


def test_ddp_over_gloo_measures_overlapped_communication(pool: WorkerPool) -> None:
    for hidden, exchange in pool.run(2, ddp_over_gloo, fresh=True):
        assert hidden > 0
        assert exchange > 0


GPU = torch.device("cuda:0")
SLEEP_CYCLES = 10**9


class AloneAsTwo(TorchCommunicator):
    """One rank on a GPU that plays both ranks of a group of two."""

    @classmethod
    def connected(cls, device: torch.device = GPU) -> Self:
        gpu = device if device.type == "cuda" else None
        alone = cls(HashStore(), 0, 1, address="127.0.0.1", gpu=gpu, timeout_seconds=30.0)
        alone.default_process_group()
        alone.world_size, alone.global_ranks = 2, range(2)
        return alone

    def dup(self, traffic: Traffic | None = None) -> Self:
        other = type(self)(
            HashStore(),
            0,
            1,
            address="127.0.0.1",
            gpu=self.gpu,
            timeout_seconds=30.0,
            traffic=traffic or self.traffic,
        )
        other.world_size, other.global_ranks = 2, range(2)
        return other

    def close(self) -> None:
        self.world_size = 1
        super().close()


def replica_on(communicator: Communicator, device: torch.device) -> Replica:
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(3))).to(device)
    replica = odd.build(communicator, toy.sgd(), layers)
    replica.clock = clock_for(device, replica.clock)
    return replica


def step_behind_the_program(name: str, device: torch.device) -> tuple[Replica, float]:
    """Run a step that the device starts after its submission; returns the start time."""
    with AloneAsTwo.connected(device) as communicator:
        replica = replica_on(communicator, device)
        strategy = create_strategy(name, {"bucket_mib": "1"})
        strategy.setup(replica)
        timeline = timeline_of(device)
        inputs = torch.ones(64, 2048, device=device)
        for step in range(2):
            # The first step loads kernels.
            if step and device.type == "cuda":
                torch.cuda._sleep(SLEEP_CYCLES)
            began = timeline.mark()
            hidden_before = replica.hidden_exchange_seconds
            strategy.backward(replica.forward(inputs).sum())
            strategy.step()
        strategy.finish()
        replica.hidden_exchange_seconds -= hidden_before
        return replica, timeline.seconds(began)


@pytest.mark.gpu
def test_overlap_over_nccl_does_not_count_gpu_lag_as_overlapped() -> None:
    replica, began = step_behind_the_program("overlap", GPU)
    exposed = replica.exposed
    assert 0 < replica.hidden_exchange_seconds <= exposed.began[-1] - began


@pytest.mark.gpu
def test_ddp_over_nccl_is_measured_on_the_gpu_timeline() -> None:
    replica, began = step_behind_the_program("ddp", GPU)
    exposed = replica.exposed
    assert len(exposed.began) == 2
    assert began < exposed.began[-1] < exposed.ended[-1]
    assert replica.hidden_exchange_seconds > 0
    # DDP is part of a reference cycle that keeps the sockets of its process group open.
    del replica
    gc.collect()


@pytest.mark.gpu
def test_mark_of_a_real_gpu_lies_between_submission_and_completion() -> None:
    timeline = timeline_of(GPU)
    before = perf_counter()
    torch.cuda._sleep(SLEEP_CYCLES)
    first = timeline.mark()
    torch.cuda._sleep(SLEEP_CYCLES)
    second = timeline.mark()
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    moments = [timeline.seconds(first), timeline.seconds(second)]
    assert before < moments[0] < moments[1] < perf_counter()
    assert moments[1] - moments[0] == pytest.approx(first.elapsed_time(second) / 1000, abs=1e-4)


@pytest.mark.gpu
def test_real_nccl_collective_completes_before_later_gpu_work() -> None:
    nccl = process_groups.create_nccl(HashStore(), 0, 1, "127.0.0.1", GPU, 30.0)
    timeline, moments = timeline_of(GPU), list[Moment]()
    tensor = torch.ones(1000, device=GPU)
    nccl.allreduce([tensor]).wait()
    torch.cuda._sleep(SLEEP_CYCLES)
    ready = timeline.mark()
    operation = OperationContext(0, "all_reduce with", (1,))
    work = NcclWork(nccl.allreduce([tensor]), operation, 30.0, timeline)
    work.add_done_callback(moments.append)
    torch.cuda._sleep(SLEEP_CYCLES)
    after = timeline.mark()
    torch.cuda.synchronize()
    work.wait()
    nccl.abort()
    (completed,) = moments
    # Each event is converted to the clock of the program, with an error of microseconds.
    assert timeline.seconds(ready) - 1e-4 <= timeline.seconds(completed) < timeline.seconds(after)
