"""Every collective is recorded, and the program computes what it computes without the recorder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline.profiler.collectives.log import (
    ASYNC,
    BACKWARD,
    EXPOSED,
    FAILED,
    OPERATIONS,
    POLLED,
    RankCollectives,
    read_logs,
)
from paceline.profiler.collectives.recorder import CollectiveRecorder
from paceline.profiler.collectives.waiting import exposed, in_progress, separate_waits
from paceline.profiler.tracking.step_tracker import StepTracker
from tests.profiler import programs
from tests.support.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


def record(
    pool: WorkerPool, folder: Path, program: Any, *arguments: Any
) -> tuple[list[Any], dict[int, RankCollectives], list[dict[str, float]]]:
    """Run a program on two ranks; returns results, logs and phases by rank."""
    outcomes = pool.run(2, programs.measured, folder, program, *arguments)
    assert [errors for _, _, errors in outcomes] == [[], []]
    (logs,) = read_logs(folder)
    return [result for result, _, _ in outcomes], logs, [phases for _, phases, _ in outcomes]


def operations(log: RankCollectives, **kept: int) -> Counter[str]:
    records = log.records
    for flag in kept.values():
        records = records[(records["flags"] & flag) != 0]
    return Counter(OPERATIONS[each] for each in records["operation"])


PROGRAMS = {
    "ddp": (programs.ddp, "plain"),
    "ddp buckets": (programs.ddp, "buckets"),
    "ddp without callbacks": (programs.without_callbacks, programs.ddp, "buckets"),
    "ddp unused": (programs.ddp, "unused"),
    "ddp static": (programs.ddp, "static"),
    "fsdp": (programs.fsdp,),
    "zero": (programs.zero,),
    "plain": (programs.plain,),
    "functional": (programs.functional_collectives,),
    "groups": (programs.groups,),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_bitwise_those_without_the_recorder(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    program, *arguments = PROGRAMS[name]
    without = pool.run(2, programs.measured, None, program, *arguments)
    results, logs, _ = record(pool, tmp_path, program, *arguments)
    for (expected, _, _), got in zip(without, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for log in logs.values():
        assert len(log.records)
        assert not len(log.unfinished)
    assert separate_waits(logs).mismatches == []


def test_ddp_exchanges_its_buckets_in_the_backward_pass(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.ddp, "buckets")
    parameters = sum(each.numel() * 4 for each in programs.model_of().parameters())
    for log in logs.values():
        (model,) = log.ddp
        assert model["has_rebuilt_buckets"]
        assert sum(model["bucket_bytes"]) == parameters
        assert len(model["bucket_bytes"]) > 1
        assert not model["find_unused_parameters"]
        backward = log.records[(log.records["flags"] & BACKWARD) != 0]
        assert set(operations(log, kept=BACKWARD)) == {"all_reduce"}
        assert (backward["flags"] & ASYNC).all()
        assert backward["bytes"].sum() == programs.STEPS * parameters
        last = backward[-len(model["bucket_bytes"]) :]
        assert last["bytes"].tolist() == model["bucket_bytes"]


def test_what_blocks_the_program_has_an_exact_end(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, phases = record(
        pool, tmp_path, programs.without_callbacks, programs.late_gradients, tmp_path
    )
    # Rank 0 waits for rank 1.
    gradients = logs[0].records[(logs[0].records["flags"] & BACKWARD) != 0]
    assert ((gradients["flags"] & EXPOSED) != 0).all()
    assert ((gradients["flags"] & POLLED) == 0).all()
    late = logs[1].records[(logs[1].records["flags"] & BACKWARD) != 0]
    assert (gradients["end"] > late["arrival"]).all()
    measured = exposed(logs[0].records).seconds
    assert phases[0]["exchange"] == pytest.approx(measured, rel=0.1, abs=0.02)


def test_bytes_are_those_of_the_formula(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.ddp, "plain")
    parameters = sum(each.numel() * 4 for each in programs.model_of().parameters())
    for log in logs.values():
        backward = log.records[(log.records["flags"] & BACKWARD) != 0]
        # 2 (P - 1) / P of the tensor, in each direction.
        assert backward["bytes_sent"].sum() == programs.STEPS * parameters
        assert backward["bytes_received"].sum() == programs.STEPS * parameters
        assert backward["messages"].sum() == programs.STEPS * 2


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("unused", "find_unused_parameters"),
        ("static", "static_graph"),
        ("static", "gradient_as_bucket_view"),
    ],
)
def test_settings_of_ddp_are_recorded(
    pool: WorkerPool, tmp_path: Path, kind: str, key: str
) -> None:
    _, logs, _ = record(pool, tmp_path, programs.ddp, kind)
    assert [log.ddp[0][key] for log in logs.values()] == [True, True]


def test_unused_parameters_cost_another_all_reduce(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.ddp, "unused")
    assert operations(logs[0], kept=BACKWARD)["all_reduce"] == 2 * programs.STEPS


def test_fsdp_gathers_parameters_and_scatters_gradients(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.fsdp)
    for log in logs.values():
        found = operations(log)
        # Three layers and the rest.
        assert found["reduce_scatter"] == 4 * programs.STEPS
        assert found["all_gather"] >= 4 * programs.STEPS


def test_zero_broadcasts_each_ranks_parameters(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.zero)
    for log in logs.values():
        from_rank_1 = (log.records["operation"] == OPERATIONS.index("broadcast")) & (
            log.records["peer"] == 1
        )
        assert from_rank_1.sum() >= programs.STEPS


def test_every_function_of_torch_distributed_is_recorded(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.plain)
    expected = Counter(
        {
            "all_reduce": 3,  # one asynchronous, one coalesced
            "all_gather": 4,  # two of all_gather_object: sizes and contents
            "broadcast": 1,
            "reduce_scatter": 1,
            "all_to_all": 1,
            "reduce": 1,
            "gather": 1,
            "scatter": 1,
            "barrier": 1,
        }
    )
    assert operations(logs[0]) == expected + Counter({"send": 2, "recv": 1})
    assert operations(logs[1]) == expected + Counter({"send": 1, "recv": 2})
    sent = [sum(log.records["bytes_sent"].tolist()) for log in logs.values()]
    received = [sum(log.records["bytes_received"].tolist()) for log in logs.values()]
    assert sum(sent) == sum(received)


def test_functional_collectives_and_dtensors_are_recorded(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.functional_collectives)
    found = operations(logs[0])
    assert found["all_reduce"] == 1
    assert found["all_gather"] == 2


def test_groups_with_the_same_name_are_told_apart(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, _ = record(pool, tmp_path, programs.groups)
    for log in logs.values():
        assert len(log.groups) == len({group.key for group in log.groups}) == 2
        assert log.records["sequence"].tolist() == [0, 0]


def test_the_clock_is_in_exchange_while_the_program_is_blocked(
    pool: WorkerPool, tmp_path: Path
) -> None:
    for name in ("ddp", "fsdp", "plain"):
        program, *arguments = PROGRAMS[name]
        folder = tmp_path / name
        folder.mkdir()
        _, logs, phases = record(pool, folder, program, *arguments)
        for rank, log in logs.items():
            measured = exposed(log.records).seconds
            # Both are measured, one call after the other.
            assert phases[rank]["exchange"] == pytest.approx(measured, rel=0.1, abs=0.02), name


def test_a_collective_is_overlapped_until_the_program_waits(
    pool: WorkerPool, tmp_path: Path
) -> None:
    _, logs, phases = record(pool, tmp_path, programs.overlapped)
    for rank, log in logs.items():
        (one,) = log.records
        assert in_progress(log.records).seconds == pytest.approx(one["end"] - one["arrival"])
        assert exposed(log.records).seconds == 0
        assert phases[rank]["exchange"] == 0


def test_a_collective_that_fails_is_recorded_as_failed(pool: WorkerPool, tmp_path: Path) -> None:
    without = pool.run(2, programs.measured, None, programs.failing)
    results, logs, _ = record(pool, tmp_path, programs.failing)
    assert "root" in results[0]
    assert results == [result for result, _, _ in without]
    for log in logs.values():
        assert [bool(flags & FAILED) for flags in log.records["flags"]] == [True, False]
        assert not len(log.unfinished)


def test_the_backend_paceline_is_recorded(pool: WorkerPool, tmp_path: Path) -> None:
    without = pool.run(2, programs.measured, None, programs.train_on, "paceline")
    results, logs, phases = record(pool, tmp_path, programs.train_on, "paceline")
    for (expected, _, _), got in zip(without, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for rank, log in logs.items():
        (group,) = log.groups
        assert group.backend == "paceline"
        assert operations(log, kept=BACKWARD) == {"all_reduce": programs.STEPS}
        assert operations(log)["barrier"] == 1
        assert not len(log.unfinished)
        assert phases[rank]["exchange"] > 0
    assert separate_waits(logs).mismatches == []


def test_ranks_wait_for_the_one_that_comes_last(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, phases = record(pool, tmp_path, programs.late_rank, tmp_path)
    waits = separate_waits(logs)
    assert waits.last_arrivals == {0: 0, 1: programs.STEPS}
    assert waits.waited[1].seconds == 0
    assert waits.caused_seconds == {0: 0.0, 1: waits.waited[0].seconds}
    late = logs[1].records["arrival"] - logs[0].records["blocked_began"]
    assert waits.waited[0].seconds == pytest.approx(late.sum())
    assert waits.waited[0].seconds <= phases[0]["exchange"]


def test_ddp_waits_for_the_rank_whose_gradients_are_late(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, phases = record(pool, tmp_path, programs.late_gradients, tmp_path)
    waits = separate_waits(logs)
    gradients = [log.records[(log.records["flags"] & BACKWARD) != 0] for log in logs.values()]
    assert len(gradients[0]) == len(gradients[1]) == programs.STEPS
    late = gradients[1]["arrival"] - gradients[0]["blocked_began"]
    assert (late > 0).all()
    waited = waits.waited[0].between([gradients[0]["arrival"][0], np.inf])
    assert waited[0] >= late.sum() * 0.999
    # Its own part of the backward pass is not exchange.
    assert phases[0]["exchange"] > late.sum()
    # Rank 0 may have begun to wait before it.
    assert phases[1]["backward"] > late.sum() / 2


def test_nothing_is_left_after_the_recorder_is_removed(pool: WorkerPool, tmp_path: Path) -> None:
    for kind in range(2):
        folder = tmp_path / str(kind)
        folder.mkdir()
        record(pool, folder, programs.groups)
    before = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.jsonl"))]
    pool.run(2, programs.measured, None, programs.groups)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*.jsonl"))] == before


def test_an_error_of_the_recorder_does_not_reach_the_program(
    pool: WorkerPool, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    without = pool.run(2, programs.measured, None, programs.ddp, "plain")
    outcomes = pool.run(2, programs.measured, missing, programs.ddp, "plain")
    for (expected, _, _), (got, _, errors) in zip(without, outcomes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
        assert "No such file or directory" in errors[0]


def test_mismatched_sizes_are_found(tmp_path: Path) -> None:
    with WorkerPool(2) as workers:
        workers.outcomes(
            2, programs.measured, tmp_path, programs.different_sizes, fresh=True, timeout_seconds=3
        )
    (logs,) = read_logs(tmp_path)
    (mismatch,) = separate_waits(logs).mismatches
    assert mismatch.sequence == 1
    assert mismatch.calls == {0: ("all_reduce", 4000, -1), 1: ("all_reduce", 8000, -1)}


def test_killed_ranks_leave_what_they_waited_in(tmp_path: Path) -> None:
    with WorkerPool(2) as workers:
        workers.outcomes(
            2, programs.measured, tmp_path, programs.missing_rank, tmp_path, fresh=True
        )
    (logs,) = read_logs(tmp_path)
    assert [len(log.records) for log in logs.values()] == [2, 1]
    assert len(logs[0].unfinished) or logs[0].records[-1]["flags"] & FAILED


def test_communication_of_an_evaluation_is_part_of_it(pool: WorkerPool, tmp_path: Path) -> None:
    _, logs, phases = record(pool, tmp_path, programs.in_evaluation)
    for rank, spent in enumerate(phases):
        assert spent["exchange"] == 0
        assert spent["evaluate"] > exposed(logs[rank].records).seconds > 0


class _Group(dist.ProcessGroup):
    """Overrides one method, and leaves the work to torch."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # not in the stubs
        self.calls = 0

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().allreduce(tensors, options or dist.AllreduceOptions())


@pytest.mark.parametrize("name", ["allreduce", "broadcast"])
def test_methods_of_subclasses_call_those_of_torch(tmp_path: Path, name: str) -> None:
    original = vars(dist.ProcessGroup)[name]
    recorder = CollectiveRecorder(StepTracker(lambda: None), tmp_path)
    recorder.hooks.replace(dist.ProcessGroup, name, recorder._make_script_call)
    group = _Group()
    # C++ looks for the method of the subclass, and must not find the replaced one again.
    with pytest.raises(RuntimeError, match="No backend"):
        getattr(group, name)([torch.ones(2)])
    assert group.calls == (name == "allreduce")
    assert recorder.script_calls == 0
    recorder.hooks.remove()
    assert vars(dist.ProcessGroup)[name] is original
