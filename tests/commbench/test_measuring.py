"""Measuring among workers that are threads: results are checked, and the slowest one counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.comm.work import CompletedWork, Work
from paceline.commbench import codecs, operations, runner
from paceline.commbench.codecs import WORLD_SIZES, CodecTiming, matrix_shape, time_codecs
from paceline.commbench.record import Limit, link_limit, make_record
from paceline.commbench.runner import CaseTiming, time_size
from paceline.commbench.spec import OPERATIONS, BenchmarkSpec, Case, make_spec
from paceline.compression.codec import Codec
from paceline.compression.timing import exchange_seconds
from paceline.errors import RunError

SIZE = 3 * 70_000 * 4
"""More than the period of the numbers that are sent, for each of three workers."""


def quick_spec(**flags: Any) -> BenchmarkSpec:
    return make_spec({"nproc_per_node": 3}, repeats=2, communicators="torch", **flags)


def timed_by(communicator: Communicator, spec: BenchmarkSpec, size: int = SIZE) -> list[CaseTiming]:
    buffer = torch.ones(size // 4 + 3)
    return time_size(size, spec.cases(), {"torch": communicator}, buffer, spec)


def test_every_operation_is_measured_alike_on_every_worker() -> None:
    spec = quick_spec(operations=",".join(OPERATIONS), algorithms="ring")
    first, *others = in_process.run(3, lambda team: timed_by(team, spec))
    assert [each.case.operation for each in first] == list(OPERATIONS)
    for each in first:
        assert len(each.samples) == each.repeats == 2
        assert min(each.samples) > 0
    assert others == [first, first]


def test_operations_with_a_pause_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(runner, "sleep", pauses.append)
    monkeypatch.setattr(runner, "BATCH_SECONDS", 1000.0)

    def batches(pause: float) -> list[int]:
        spec = quick_spec(algorithms="ring", pause=pause)
        timings = in_process.run(3, lambda team: timed_by(team, spec, size=1200))[0]
        return [each.batch for each in timings]

    assert batches(0.0) == [runner.MAX_BATCH]
    pauses.clear()
    assert batches(0.25) == [1]
    assert pauses == [0.25] * 6  # two repeats of three workers


@pytest.mark.parametrize("size", [4, 1000])
def test_tensors_that_do_not_divide_evenly_are_cut_to_equal_chunks(size: int) -> None:
    assert operations.elements_of("all_gather", size, 3) == max(3, size // 4 // 3 * 3)
    assert operations.elements_of("all_reduce", size, 3) == size // 4


class Forgetful:
    """Gives one worker a communicator that leaves a tensor as it is."""

    def __init__(self, team: Communicator, rank: int) -> None:
        self._team = team
        self._forgets = team.rank == rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._team, name)

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        copy = tensor.clone() if self._forgets else tensor
        return self._team.broadcast(copy, root, kind)


def test_a_wrong_result_ends_the_measuring_and_names_the_worker() -> None:
    case = Case("broadcast", "torch", "library")

    def work(team: Communicator) -> str:
        operation = operations.make(case, Forgetful(team, 1), torch.ones(64), 256)  # type: ignore[arg-type]
        with pytest.raises(RunError) as raised:
            runner._check(operation, case, team)
        return str(raised.value)

    message = "broadcast by library through torch gave a wrong result: 256 B, rank 1"
    assert in_process.run(3, work) == [message] * 3


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_result_passes_that_was_never_sent(operation: str) -> None:
    """A check that could not fail would show nothing."""
    case = Case(operation, "torch", "library")

    class Deaf(Forgetful):
        def _nothing(self, *arguments: object) -> Work:
            return CompletedWork()

        all_reduce = reduce_scatter = all_gather = broadcast = _nothing  # type: ignore[assignment]
        gather = scatter = send = recv = _nothing

    def work(team: Communicator) -> bool:
        deaf = Deaf(team, 0)
        own = operations.make(case, deaf, torch.ones(64), 256)  # type: ignore[arg-type]
        own.fill()
        own.run()
        return own.is_correct()

    assert not all(in_process.run(2, work))


def test_the_slowest_worker_counts() -> None:
    def work(team: Communicator) -> list[float]:
        return runner._slowest(team, [[1.0, 5.0], [4.0, 2.0], [3.0, 3.0]][team.rank])

    assert in_process.run(3, work) == [[4.0, 5.0]] * 3


def record_of(samples: Sequence[float], size: int, limit: Limit | None) -> dict[str, Any]:
    spec = quick_spec(algorithms="ring", sizes="1m")
    rank_info = SINGLE_PROCESS.__class__(0, 4, 0, 4, 0, 1, "127.0.0.1", 0, False)
    timed = CaseTiming(spec.cases()[0], size, batch=1, repeats=len(samples), samples=list(samples))
    return make_record(
        spec,
        rank_info,
        [timed],
        [CodecTiming("bf16", 8, 1024, (16, 16), [0.5, 0.25, 0.75])],
        [],
        {"link": limit, "memory": None},
        None,
        tensors="main memory",
    )


def test_bandwidths_are_of_the_median_and_the_bus_carries_what_an_all_reduce_must_move() -> None:
    record = record_of([0.5, 9.0, 0.25], size=1_000_000, limit=Limit("link", 6e6, "asked"))
    (entry,) = record["measurements"]
    assert entry["algorithm_bytes_per_second"] == 2e6
    # Each of four workers has to send 2 x 3/4 of the tensor.
    assert entry["bus_bytes_per_second"] == 3e6
    assert entry["share_of_limit"] == 0.5
    assert entry["seconds"] == {"mean": 3.25, "median": 0.5, "p95": 9.0, "least": 0.25}


def test_a_codec_has_a_summary_and_all_samples() -> None:
    (entry,) = record_of([1.0], size=4, limit=None)["codecs"]
    assert (entry["codec"], entry["workers"], entry["bytes"]) == ("bf16", 8, 1024)
    assert entry["shape"] == [16, 16]
    assert entry["seconds"] == {"mean": 0.5, "median": 0.5, "p95": 0.75, "least": 0.25}
    assert entry["samples_seconds"] == [0.5, 0.25, 0.75]


@pytest.mark.parametrize(("elements", "shape"), [(1, (1, 1)), (12, (3, 4)), (7, (1, 7))])
def test_a_codec_is_timed_with_a_matrix_close_to_a_square(
    elements: int, shape: tuple[int, int]
) -> None:
    assert matrix_shape(elements) == shape


def test_codecs_are_timed_with_matrices_that_they_may_compress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[Any] = []

    def timed(codec: Codec, gradient: Tensor, workers: int, given: Any) -> float:
        shapes.append((gradient.numel(), *given))
        return exchange_seconds(codec, gradient, workers, given)

    monkeypatch.setattr(codecs, "exchange_seconds", timed)
    spec = quick_spec(codecs="powersgd", sizes="16k")
    cpu = torch.device("cpu")
    in_process.run(1, lambda team: time_codecs(spec, team, cpu, runner._slowest))
    assert {*shapes} == {(4096, (64, 64))}


def test_codecs_are_timed_alike_on_every_worker() -> None:
    spec = quick_spec(codecs="bf16,int8", sizes="1k,4k")
    device = torch.device("cpu")

    def work(team: Communicator) -> list[CodecTiming]:
        return time_codecs(spec, team, device, runner._slowest)

    first, *others = in_process.run(3, work)
    assert {(each.codec, each.size_bytes) for each in first} == {
        (codec, size) for codec in ("bf16", "int8") for size in (1024, 4096)
    }
    assert {each.workers for each in first} == set(WORLD_SIZES)
    assert all(len(each.samples) == 2 and min(each.samples) > 0 for each in first)
    assert others == [first, first]


def test_without_a_limit_there_is_no_share_of_it() -> None:
    (entry,) = record_of([1.0], size=4, limit=None)["measurements"]
    assert entry["share_of_limit"] is None


def cluster(got: list[dict[str, Any]]) -> dict[str, Any]:
    asked = {"bandwidth_bits_per_second": 1e9, "bandwidth_of": {"3": 8e7}}
    return {"asked": asked, "got": got, "warnings": []}


def link(what: str, got: float) -> dict[str, Any]:
    return {"what": what, "node": 0, "asked": 1e9, "got": got, "unit": "bit/s"}


@pytest.mark.parametrize(
    ("flags", "cluster_record", "rate"),
    [
        ({}, None, None),
        ({}, cluster([link("bandwidth in", 9e8), link("bandwidth out", 8e8)]), 1e8),
        ({}, cluster([link("round trip", 1e-3)]), 1e7),
        ({"link": "16mbit"}, cluster([link("bandwidth in", 9e8)]), 2e6),
    ],
    ids=["unknown", "slowest of those measured", "slowest of those asked for", "as the user says"],
)
def test_the_limit_of_the_link(
    flags: dict[str, str], cluster_record: dict[str, Any] | None, rate: float | None
) -> None:
    limit = link_limit(quick_spec(**flags), cluster_record)
    assert (limit and limit.bytes_per_second) == rate
