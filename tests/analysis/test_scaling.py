"""Speedup and efficiency: what is held against what, and what is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.scaling import scaling_series
from paceline.analysis.verdict import make_verdict
from paceline.report.document import BulletList, Table
from paceline.report.sections.scaling import scaling_answer
from paceline.report.wording.headline import headline
from tests.support.marks import figure, numbers, section, series
from tests.support.records import FakeRun, write_repeats, write_run


def write_scaling(root: Path, *, is_weak: bool) -> None:
    """1, 2 and 4 workers at 10, 6 and 4 ms an iteration."""
    for workers, seconds in ((1, 0.010), (2, 0.006), (4, 0.004)):
        batch = 32 * workers if is_weak else 128
        run = FakeRun(f"w{workers}", {"batch_size": batch}, [{"forward": seconds}] * workers)
        run.more = {"samples": batch * run.iterations}
        write_run(root, run)


def test_strong_scaling_is_time_against_time(tmp_path: Path) -> None:
    write_scaling(tmp_path, is_weak=False)
    (family,) = scaling_series(collect(tmp_path).groups)
    assert family.kind == "strong"
    speedups = [point.speedup for point in family.points]
    assert speedups == pytest.approx([1, 10 / 6, 10 / 4])
    efficiencies = [family.efficiency(point) for point in family.points]
    assert efficiencies == pytest.approx([1, 10 / 12, 10 / 16])
    svg = figure(section(collect(tmp_path).groups, "scaling"), "scaling-strong-speedup")
    ideal, measured = series(svg)
    assert numbers(ideal, "data-y") == [1, 2, 4]
    assert numbers(measured, "data-y") == pytest.approx(speedups)


def test_weak_scaling_is_samples_a_second(tmp_path: Path) -> None:
    write_scaling(tmp_path, is_weak=True)
    (family,) = scaling_series(collect(tmp_path).groups)
    assert family.kind == "weak"
    speedups = [point.speedup for point in family.points]
    assert speedups == pytest.approx([1, 2 * 10 / 6, 4 * 10 / 4])


def test_each_model_scales_by_itself(tmp_path: Path) -> None:
    for model, seconds in (("lenet", 0.010), ("vgg11", 0.100)):
        for workers in (1, 2):
            settings = {"model": model, "batch_size": 64}
            phases = [{"forward": seconds / workers}] * workers
            write_run(tmp_path, FakeRun(f"{model}-{workers}", settings, phases))
    found = scaling_series(collect(tmp_path).groups)
    assert [family.name for family in found] == ["allreduce, lenet", "allreduce, vgg11"]
    assert [family.points[-1].speedup for family in found] == pytest.approx([4, 4])


def test_workers_that_were_slowed_down_are_another_way(tmp_path: Path) -> None:
    write_scaling(tmp_path, is_weak=False)
    slowed = FakeRun("slow", {"batch_size": 128, "slow": "0=2"}, [{"forward": 0.5}] * 2)
    write_run(tmp_path, slowed)
    names = {family.name: len(family.points) for family in scaling_series(collect(tmp_path).groups)}
    assert names == {"allreduce": 3, "allreduce, slow 0=2": 2}


def test_ways_that_a_study_calls_the_same_are_told_apart(tmp_path: Path) -> None:
    write_scaling(tmp_path, is_weak=False)
    slowed = {"batch_size": 128, "slow": "0=2"}
    write_run(tmp_path, FakeRun("slow", slowed, [{"forward": 0.5}] * 2))
    groups = [
        dataclasses.replace(group, axes={"strategy": "all"}) for group in collect(tmp_path).groups
    ]
    names = sorted(family.name for family in scaling_series(groups))
    assert names == ["allreduce", "allreduce, slow 0=2"]


def test_each_is_held_against_the_ideal_from_where_it_begins(tmp_path: Path) -> None:
    """One way begins with two workers, where no group has one."""
    for strategy, counts in (("ring", (2, 4)), ("tree", (4, 8))):
        for workers in counts:
            settings = {"strategy": strategy, "batch_size": 128}
            phases = [{"forward": 0.08 / workers}] * workers
            write_run(tmp_path, FakeRun(f"{strategy}-{workers}", settings, phases,
                                        more={"samples": 12_800}))  # fmt: skip
    groups = collect(tmp_path).groups
    svg = figure(section(groups, "scaling"), "scaling-strong-speedup")
    found = {(tuple(numbers(one, "data-x")), tuple(numbers(one, "data-y"))) for one in series(svg)}
    assert found == {((2, 4, 8), (1, 2, 4)), ((4, 8), (1, 2)), ((2, 4), (1, 2))}
    answer = scaling_answer(scaling_series(groups))
    assert answer.startswith("With 8 workers instead of 4: tree 2.00 times")


def test_one_worker_communicates_with_nobody(tmp_path: Path) -> None:
    """The clock passes through the phase, and the strategy through its motions."""
    for workers, exchange in ((1, 1e-6), (2, 1e-3)):
        phases = [{"forward": 0.01, "exchange": exchange}] * workers
        run = FakeRun(f"w{workers}", {"batch_size": 64}, phases, hidden=0.002)
        write_run(tmp_path, run)
    built = section(collect(tmp_path).groups, "scaling")
    (table,) = [block for block in built.blocks if isinstance(block, Table)]
    # 50 of 100 iterations make an epoch.
    assert [row[-2:] for row in table.rows] == [("-", "none"), ("50.00 ms", "100.00 ms")]


def test_overlapped_communication_that_was_not_measured_is_said_to_be(tmp_path: Path) -> None:
    for workers in (1, 2):
        phases = [{"forward": 0.01, "exchange": 0.001}] * workers
        run = FakeRun(f"w{workers}", {"batch_size": 64}, phases, hidden=None)
        write_run(tmp_path, run)
    built = section(collect(tmp_path).groups, "scaling")
    (table,) = [block for block in built.blocks if isinstance(block, Table)]
    assert [row[-1] for row in table.rows] == ["none", "not measured"]


def write_superlinear(root: Path, threads: tuple[int, int] | None = None, cores: int = 2) -> None:
    """73.7 ms with one worker and 10 ms with two: 7.37 times as fast."""
    for workers, seconds in ((1, 0.0737), (2, 0.010)):
        settings: dict[str, object] = {"batch_size": 64}
        if threads is not None:
            settings["threads"] = threads[workers - 1]
        hardware = {"cpu": "a CPU", "cores": cores, "cores_in_machine": cores, "gpus": []}
        run = FakeRun(f"w{workers}", settings, [{"forward": seconds}] * workers)
        run.more = {"samples": 64 * run.iterations, "hardware": hardware}
        write_run(root, run)


@pytest.mark.parametrize(
    ("threads", "cores", "reason"),
    [
        # Without a setting, one worker has two threads and each of two has one: nothing is gained.
        (None, 2, "a slow base run (2 cores cannot give a speedup of 7.37)"),
        ((1, 1), 2, "a slow base run (2 cores cannot give a speedup of 7.37)"),
        ((1, 4), 2, "a slow base run (2 cores cannot give a speedup of 7.37)"),
        ((1, 4), 16, "threads (1 per worker in the base, 4 here)"),
        ((1, 1), 16, "CPU cache (each worker has a smaller batch) or a slow base run"),
    ],
)
def test_efficiency_above_100_percent_is_flagged_with_its_likely_reason(
    threads: tuple[int, int] | None, cores: int, reason: str, tmp_path: Path
) -> None:
    write_superlinear(tmp_path, threads, cores)
    groups = collect(tmp_path).groups
    flag = f"efficiency 368.5%, above 100%; likely reason: {reason}"
    assert flag in scaling_answer(scaling_series(groups))
    items = [block for block in section(groups, "scaling").blocks if isinstance(block, BulletList)]
    assert any(flag in text for block in items for _, text in block.items)
    assert flag in headline(make_verdict(groups)), "it wins the verdict, but not silently"


@pytest.mark.parametrize(
    ("ratio", "factors", "is_flagged"),
    [
        (2.02, (1.0,), False),
        (2.12, (1.0,), True),
        (2.002, (0.97, 1.0, 1.03), False),
        (2.12, (0.9, 1.0, 1.1), False),
        (2.12, (0.999, 1.0, 1.001), True),
        (2.04, (0.999, 1.0, 1.001), True),
    ],
)
def test_efficiency_above_100_percent_is_flagged_only_beyond_noise(
    ratio: float, factors: Sequence[float], is_flagged: bool, tmp_path: Path
) -> None:
    """The spread of repeats says what noise is; single runs differ by a few percent."""
    for workers, seconds in ((1, 0.01 * ratio), (2, 0.010)):
        run = FakeRun(f"w{workers}", {"batch_size": 64}, [{"forward": seconds}] * workers)
        run.more = {"samples": 64 * run.iterations}
        write_repeats(tmp_path, run, factors)
    groups = collect(tmp_path).groups
    assert f"efficiency {50 * ratio:.0f}" in scaling_answer(scaling_series(groups))
    assert ("above 100%" in scaling_answer(scaling_series(groups))) == is_flagged
    assert ("above 100%" in headline(make_verdict(groups))) == is_flagged


def test_efficiency_up_to_100_percent_is_not_flagged(tmp_path: Path) -> None:
    write_scaling(tmp_path, is_weak=False)
    groups = collect(tmp_path).groups
    assert "above 100%" not in scaling_answer(scaling_series(groups))
    assert "above 100%" not in headline(make_verdict(groups))


def test_an_approximate_strategy_is_marked_where_speedups_are_told(tmp_path: Path) -> None:
    for strategy, workers, seconds in (("single", 1, 0.02), ("ring", 2, 0.015), ("easgd", 2, 0.01)):
        settings = {"strategy": strategy, "batch_size": 64}
        write_run(tmp_path, FakeRun(strategy, settings, [{"forward": seconds}] * workers,
                                    more={"samples": 6400}))  # fmt: skip
    message = scaling_answer(scaling_series(collect(tmp_path).groups))
    assert "easgd (approximate) 2.00 times as fast" in message
    assert "ring 1.33 times as fast" in message
