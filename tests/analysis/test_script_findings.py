"""Findings about profiled scripts, each from records that show its fault and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.script import findings as found
from paceline.analysis.script.findings import ScriptFinding, find_in_script, is_fault
from paceline.analysis.script.slow_rank import SlowRank, WaitsForCore
from paceline.report.wording import scripts
from tests.support.script_records import BALANCED, SCRIPT, FakeScript, line, write_script

WAITS = {**BALANCED, "wait": 0.003}
"""A rank that waits for a slower one."""


def faults(root: Path, script: FakeScript) -> list[ScriptFinding]:
    return [one for one in find_in_script(write_script(root, script)) if is_fault(one)]


def only_fault(root: Path, script: FakeScript) -> Any:
    (one,) = faults(root, script)
    text = f"{scripts.sentence(one)} {scripts.remedy(one)}"
    assert "None" not in text
    assert "nan" not in text
    return one


def call(name: str, count: int, seconds: float, **values: Any) -> dict[str, Any]:
    steps = values.pop("steps", count)
    return {
        "call": name, **line(23, "total += loss.item()"), "count": count, "steps": steps,
        "seconds": seconds, "bytes": 0, **values,
    }  # fmt: skip


def copies(seconds: float, **values: int) -> dict[str, Any]:
    return {
        "call": "Tensor.to", **line(21, 'inputs = inputs.to("cuda")'), "count": 400, "steps": 200,
        "seconds": seconds, "gpu_seconds": seconds / 2, "bytes": 1 << 30, "pageable_bytes": 0,
        "blocking_bytes": 0, **values,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["pageable_bytes", "blocking_bytes"])
def test_copies_that_block_each_step_are_named_with_their_line(tmp_path: Path, kind: str) -> None:
    facts: dict[str, Any] = {"copies": [copies(0.4, **{kind: 1 << 30})]}
    one = only_fault(tmp_path, FakeScript(facts=(facts, {})))
    assert isinstance(one, found.BlockingCopy)
    assert (one.line.number, one.is_pageable) == (21, kind == "pageable_bytes")
    assert one.share == pytest.approx(0.2)
    assert (one.seconds, one.bytes) == (0.002, (1 << 30) / 200)
    assert ("pin_memory" in scripts.remedy(one)) == one.is_pageable


def test_copies_that_do_not_block_or_cost_little_are_no_fault(tmp_path: Path) -> None:
    few = copies(0.4, pageable_bytes=1 << 30, steps=20)
    cheap = copies(0.01, pageable_bytes=1 << 30)
    facts: dict[str, Any] = {"copies": [copies(0.4), few, cheap]}
    assert faults(tmp_path, FakeScript(facts=(facts, {}))) == []


def test_a_balanced_run_has_no_fault_but_a_bottleneck(tmp_path: Path) -> None:
    run = write_script(tmp_path, FakeScript())
    (one,) = find_in_script(run)
    assert isinstance(one, found.StepBound)
    assert one.bottleneck.kind == "compute-bound"


@pytest.mark.parametrize(
    ("compute", "other", "kind"), [(30, 48, "bound by other code"), (48, 30, "compute-bound")]
)
def test_the_largest_part_of_a_step_is_its_bottleneck(
    tmp_path: Path, compute: int, other: int, kind: str
) -> None:
    phases = {"forward": compute / 1e4, "exchange": 22e-4, "other": other / 1e4}
    bounds = [
        one
        for one in find_in_script(write_script(tmp_path, FakeScript((phases, phases))))
        if isinstance(one, found.StepBound)
    ]
    assert [one.bottleneck.kind for one in bounds] == [kind]


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "other"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_straggler_is_named_with_its_rank_and_phase(
    tmp_path: Path, rank: int, phase: str
) -> None:
    slow = {**BALANCED, phase: BALANCED.get(phase, 0.0) + 0.003}
    phases = [slow, WAITS] if rank == 0 else [WAITS, slow]
    one = only_fault(tmp_path, FakeScript(phases))
    assert isinstance(one, SlowRank)
    assert (one.rank, one.phase, one.since) == (rank, phase, None)
    assert one.share == pytest.approx(0.003 / 0.013, rel=0.01)
    assert (one.line is not None) == (phase == "input")


def test_a_straggler_is_dated(tmp_path: Path) -> None:
    slow = {**BALANCED, "forward": 0.007}
    one = only_fault(tmp_path, FakeScript(later=[WAITS, slow], since=80))
    assert isinstance(one, SlowRank)
    assert one.since is not None
    assert abs(one.since - 80) <= 20


def with_ratios(ratios: Sequence[float], block: int = 20) -> FakeScript:
    """Rank 1 computes `ratios[i]` times as long as rank 0 in block i, and rank 0 waits for it."""
    usual = math.fsum(BALANCED[phase] for phase in ("forward", "backward", "update"))
    excess = [(ratio - 1) * usual for ratio in ratios]
    by_block = [
        (
            {**BALANCED, "wait": max(more, 0.0)},
            {**BALANCED, "backward": BALANCED["backward"] + more, "wait": max(-more, 0.0)},
        )
        for more in excess
    ]
    phases = by_block[0]
    steps = block * len(ratios)
    return FakeScript(phases, by_block=[*by_block, phases], steps=steps, block=block)


@pytest.mark.parametrize(
    "ratios",
    [
        [1.0] * 7 + [1.4, 1.4],
        # Runs without faults, in blocks of half a second.
        [1.04, 1.21, 0.85, 0.74, 0.72],
        [1.02, 1.23, 1.18, 1.21, 1.20, 1.15],
        [1.00, 1.02, 1.11, 1.14, 1.13, 1.17],
        [1.01, 1.00, 1.16, 1.20, 1.11],
    ],
)
def test_a_rank_that_is_slow_for_a_few_blocks_is_no_straggler(
    tmp_path: Path, ratios: list[float]
) -> None:
    assert not faults(tmp_path, with_ratios(ratios))


@pytest.mark.parametrize(
    "ratios",
    [
        [1.24, 1.18, 1.42, 1.33, 1.29],
        [1.09, 1.28, 1.31, 1.25, 1.30],
        [1.5, 1.05] * 8,
    ],
)
def test_the_blocks_of_a_straggler_may_vary(tmp_path: Path, ratios: list[float]) -> None:
    one = only_fault(tmp_path, with_ratios(ratios))
    assert isinstance(one, SlowRank)
    assert (one.rank, one.since) == (1, None)


def test_blocks_that_vary_more_than_a_rank_is_slow_show_no_straggler(tmp_path: Path) -> None:
    assert not faults(tmp_path, with_ratios([1.6, 0.9, 1.5, 1.0, 1.4]))


def test_a_thread_without_a_core_may_be_communicating(tmp_path: Path) -> None:
    phases = [{**BALANCED, "exchange": 0.0096}, {**BALANCED, "exchange": 0.009, "forward": 0.0046}]
    # If all of it was outside communication, rank 0 would compute for 9.0 ms, and rank 1 for 10.1.
    growth = [{"main_queue_seconds": 0.0005}, {}]
    named = faults(tmp_path, FakeScript(phases, growth=growth))
    assert not any(isinstance(one, SlowRank) for one in named)


def test_a_slow_rank_that_nobody_waits_for_is_no_straggler(tmp_path: Path) -> None:
    assert not faults(tmp_path, FakeScript([BALANCED, {**BALANCED, "forward": 0.007}]))


def test_a_rank_that_waits_for_a_core_is_not_blamed(tmp_path: Path) -> None:
    slow = {**BALANCED, "forward": 0.007}
    growth = [{}, {"main_queue_seconds": 0.0025}]
    one = only_fault(tmp_path, FakeScript([WAITS, slow], growth=growth))
    assert isinstance(one, WaitsForCore)
    assert one.rank == 1


@pytest.mark.parametrize(("queue_seconds", "count"), [(0.004, 1), (0.007, 0)])
def test_a_straggler_loses_more_time_than_cold_caches_explain(
    tmp_path: Path, queue_seconds: float, count: int
) -> None:
    waits, slow = {**BALANCED, "wait": 0.0015}, {**BALANCED, "forward": 0.0055}
    growth = [{"main_queue_seconds": queue_seconds}] * 2
    named = faults(tmp_path, FakeScript([waits, slow], growth=growth))
    assert [type(one) for one in named] == [SlowRank] * count


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("queue_seconds", "count"), [(0.003, 1), (0.007, 0)])
def test_slow_input_takes_more_time_than_ranks_lack_a_core(
    tmp_path: Path, queue_seconds: float, count: int, workers: int
) -> None:
    loader = {**line(15, "loader = DataLoader(data)"), "workers": workers, "batches": 200,
              "seconds": 1.0}  # fmt: skip
    phases = [{**BALANCED, "input": 0.005}] * 2
    growth = [{"main_queue_seconds": queue_seconds}] * 2
    script = FakeScript(phases, facts=[{"loaders": [loader]}] * 2, growth=growth)
    assert len(faults(tmp_path, script)) == count


@pytest.mark.parametrize(("cores", "advises_workers"), [(2, False), (8, True)])
def test_more_loader_workers_need_spare_cores(
    tmp_path: Path, cores: int, advises_workers: bool
) -> None:
    loader = {**line(15, "loader = DataLoader(data)"), "workers": 2, "batches": 200, "seconds": 1.0}
    phases = [{**BALANCED, "input": 0.005}] * 2
    facts = {"loaders": [loader], "cores": cores}
    one = only_fault(tmp_path, FakeScript(phases, facts=[facts] * 2))
    assert ("Use more than num_workers=2" in scripts.remedy(one)) == advises_workers


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_input_of_all_ranks(tmp_path: Path, workers: int) -> None:
    loader = {**line(15, "loader = DataLoader(data)"), "workers": workers, "batch_size": 32,
              "batches": 200, "seconds": 1.0}  # fmt: skip
    phases = [{**BALANCED, "input": 0.005}] * 2
    one = only_fault(tmp_path, FakeScript(phases, facts=[{"loaders": [loader]}] * 2))
    assert isinstance(one, found.SlowInput if workers else found.NoLoaderWorkers)
    assert one.line is not None
    assert one.line.text == "train.py:15"
    assert one.share == pytest.approx(1 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("name", "seconds", "values", "is_costly"),
    [
        ("Tensor.item", 0.2, {}, True),
        ("Tensor.item", 0.001, {}, False),
        ("dist.all_reduce", 0.2, {"bytes": 200 * 4}, True),
        ("dist.barrier", 0.2, {}, True),
    ],
)
def test_a_blocking_call_in_every_step_is_named_by_its_line(
    tmp_path: Path, name: str, seconds: float, values: dict[str, Any], is_costly: bool
) -> None:
    script = FakeScript(facts=[{}, {"calls": [call(name, 200, seconds, **values)]}])
    named = find_in_script(write_script(tmp_path, script))
    (one,) = (one for one in named if isinstance(one, found.BlockingCall))
    assert (one.call, one.line.text, one.is_costly) == (name, "train.py:23", is_costly)
    assert one.seconds == pytest.approx(seconds / 200)


IN_LIBRARY = {"library": {"file": "framework/loops/epoch.py", "line": 265}}


def test_a_call_of_a_library_is_not_for_the_script_to_change(tmp_path: Path) -> None:
    recorded = call("Tensor.item", 200, 0.2, **IN_LIBRARY)
    one = only_fault(tmp_path, FakeScript(facts=[{"calls": [recorded]}, {}]))
    lines = "in framework/loops/epoch.py:265, called from train.py:23"
    assert f" ({lines}: `total += loss.item()`)." in scripts.sentence(one)
    assert scripts.remedy(one).startswith("The call is made by framework, not by the script")
    assert "every 50 steps" not in scripts.remedy(one)
    assert scripts.account(one).count(lines) == 1


def test_calls_of_one_line_of_the_script_are_told_apart_by_those_of_the_library(
    tmp_path: Path,
) -> None:
    other = {"library": {"file": "framework/loops/epoch.py", "line": 301}}
    calls = [call("Tensor.item", 200, 0.2, **one) for one in (IN_LIBRARY, other)]
    assert len(faults(tmp_path, FakeScript(facts=[{"calls": calls}, {}]))) == 2


@pytest.mark.parametrize("library", [None, "framework", {"file": "framework/loop.py"}])
def test_an_invalid_line_of_a_library_is_ignored(tmp_path: Path, library: Any) -> None:
    recorded = call("Tensor.item", 200, 0.2, library=library)
    one = only_fault(tmp_path, FakeScript(facts=[{"calls": [recorded]}, {}]))
    assert one.line.text == "train.py:23"


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("transformers/trainer.py", "TrainingArguments(ddp_find_unused_parameters=False)"),
        ("framework.py", "constructed by framework, not by the script: use its option for"),
    ],
)
def test_the_option_of_a_library_that_searches_for_unused_parameters(
    tmp_path: Path, file: str, advice: str
) -> None:
    model = {**line(9, "trainer.train()"), "bucket_bytes": [5_000_000], "searches": 200,
             "find_unused_parameters": True, "unused_bytes": 0, "same_parameters_unused": True,
             "search_seconds": 0.1, "library": {"file": file, "line": 12}}  # fmt: skip
    one = only_fault(tmp_path, FakeScript(facts=[{"ddp_models": [model]}] * 2))
    assert advice in scripts.remedy(one)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Tensor.item", {"steps": 20}),
        ("dist.all_reduce", {"bytes": 200 * 1_000_000}),
        ("torch.save", {}),
    ],
    ids=["every tenth step", "gradients", "checkpoint"],
)
def test_other_calls_are_not_blocking(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    script = FakeScript(facts=[{"calls": [call(name, 200, 0.2, **values)]}, {}])
    named = find_in_script(write_script(tmp_path, script))
    assert not any(isinstance(one, found.BlockingCall) for one in named)


def test_too_many_threads_need_evidence(tmp_path: Path) -> None:
    facts = [{"threads": 2, "omp_num_threads": None}] * 2
    assert not faults(tmp_path / "quiet", FakeScript(facts=facts))
    growth = [{"queue_seconds": 0.004}] * 2
    one = only_fault(tmp_path / "busy", FakeScript(facts=facts, growth=growth))
    assert isinstance(one, found.TooManyThreads)
    assert (one.ranks, one.threads, one.cores, one.is_default) == (2, 2, 2, True)
    assert "OMP_NUM_THREADS=1" in scripts.remedy(one)


def test_threads_that_fit_are_not_too_many(tmp_path: Path) -> None:
    assert not faults(tmp_path, FakeScript(growth=[{"queue_seconds": 0.004}] * 2))


@pytest.mark.parametrize(
    ("sets", "cores", "are_too_many"),
    [
        # Each rank has a core of its own, as mpirun binds them.
        (("1", "2"), 1, False),
        (("1", "1"), 1, True),
        # A quota of one core, which both share.
        (("3", "3"), 1, True),
    ],
)
def test_ranks_that_are_bound_to_different_cores_do_not_share_them(
    tmp_path: Path, sets: tuple[str, str], cores: int, are_too_many: bool
) -> None:
    facts = [{"threads": 1, "cores": cores, "core_set": one} for one in sets]
    script = FakeScript(facts=facts, growth=[{"queue_seconds": 0.004}] * 2)
    found_here = [isinstance(one, found.TooManyThreads) for one in faults(tmp_path, script)]
    assert found_here == [True] * are_too_many


def test_small_buckets_of_exposed_communication(tmp_path: Path) -> None:
    phases = [{**BALANCED, "exchange": 0.003}] * 2
    model = {**line(9, "net = DDP(net, bucket_cap_mb=0.1)"), "bucket_bytes": [100_000] * 30,
             "find_unused_parameters": False}  # fmt: skip
    script = FakeScript(phases, facts=[{"ddp_models": [model]}] * 2)
    one = only_fault(tmp_path, script)
    assert isinstance(one, found.SmallBuckets)
    assert one.is_ddp
    assert (one.per_step, one.mean_bytes) == (30, 100_000)


def test_all_reduces_of_single_parameters(tmp_path: Path) -> None:
    phases = [{**BALANCED, "exchange": 0.003}] * 2
    calls = [call("dist.all_reduce", 4000, 0.6, steps=200, bytes=4000 * 50_000)]
    one = only_fault(tmp_path, FakeScript(phases, facts=[{"calls": calls}] * 2))
    assert isinstance(one, found.SmallBuckets)
    assert not one.is_ddp
    assert (one.per_step, one.mean_bytes) == (20, 50_000)


@pytest.mark.parametrize(
    ("of_last_rank", "count"),
    [
        ({}, 1),
        ({"unused_bytes": 1000}, 0),
        # In some steps, which the size does not cover.
        ({"same_parameters_unused": False}, 0),
    ],
)
def test_find_unused_parameters_is_named_if_all_ranks_always_use_all(
    tmp_path: Path, of_last_rank: dict[str, Any], count: int
) -> None:
    model = {**line(9, "net = DDP(net)"), "bucket_bytes": [5_000_000], "searches": 200,
             "find_unused_parameters": True, "unused_bytes": 0, "same_parameters_unused": True,
             "search_seconds": 0.1}  # fmt: skip
    facts = [{"ddp_models": [model]}, {"ddp_models": [{**model, **of_last_rank}]}]
    named = faults(tmp_path, FakeScript(facts=facts))
    assert [type(one) for one in named] == [found.NeedlessSearch] * count


def test_ranks_that_wait_in_turn_are_imbalanced(tmp_path: Path) -> None:
    one = only_fault(tmp_path, FakeScript([{**BALANCED, "wait": 0.004}] * 2))
    assert isinstance(one, found.Imbalance)
    assert one.share == pytest.approx(0.004 / 0.014)


def test_contention_explains_waiting(tmp_path: Path) -> None:
    nodes = [{"node": 0, "cpu_percent_mean": 100.0, "machine_cpu_percent_mean": 96.0}]
    script = FakeScript([{**BALANCED, "wait": 0.004}] * 2, more={"nodes": nodes})
    assert not find_in_script(write_script(tmp_path, script))


def test_checkpoints_that_block_training(tmp_path: Path) -> None:
    run = write_script(
        tmp_path,
        FakeScript(
            facts=[{"calls": [call("torch.save", 4, 0.4, steps=4)]}, {}],
            more={"checkpoints": {"count": 4, "bytes": 0, "blocked_seconds": 0.4}},
        ),
    )
    assert run.result is not None
    run.result["workers"][0]["phases"]["checkpoint"] = 0.4
    (one,) = (one for one in find_in_script(run) if is_fault(one))
    assert isinstance(one, found.CheckpointStalls)
    assert (one.count, one.seconds) == (4, 0.1)
    assert one.line is not None
    assert one.line.file == SCRIPT


def test_memory_that_grows_until_the_end(tmp_path: Path) -> None:
    script = FakeScript(block=10, growth=[{"rss_bytes": 2_000_000}, {}])
    one = only_fault(tmp_path, script)
    assert isinstance(one, found.GrowingMemory)
    assert one.rank == 0
    assert one.bytes_per_step == pytest.approx(2_000_000)


def test_few_steps_show_nothing(tmp_path: Path) -> None:
    slow = {**BALANCED, "forward": 0.02}
    assert not find_in_script(write_script(tmp_path, FakeScript([WAITS, slow], steps=19, block=5)))
