"""CPU contention is reported if it may affect the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.contention import other_processes_share
from paceline.analysis.run import open_run
from paceline.analysis.verdict import make_verdict
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from paceline.report.wording.recommendations import next_steps
from tests.support.records import FakeRun, write_run


def run_beside_others(
    folder: Path, run: FakeRun, machine_percent: float, own_percents: list[float]
) -> Path:
    """On two cores; `machine_percent` is of both, as the sampler has it."""
    path = write_run(folder, run)
    file = path / "result.json"
    result = json.loads(file.read_text())
    result["nodes"] = [
        {**result["nodes"][0], "node": node, "cpu_percent_mean": percent,
         "machine_cpu_percent_mean": machine_percent}
        for node, percent in enumerate(own_percents)
    ]  # fmt: skip
    file.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("settings", "machine", "own", "share"),
    [
        ({}, 100.0, [58.0], 1 - 0.29),
        ({}, 50.0, [100.0], 0.0),
        # The worse of two real machines.
        ({"nnodes": 2}, 90.0, [160.0, 40.0], 0.9 - 0.2),
        # Two emulated ones are on one: together they use 80% of it.
        ({"nnodes": 2, "cluster": "nodes=2"}, 90.0, [80.0, 80.0], 0.1),
    ],
)
def test_what_others_used_is_the_machines_use_without_the_runs_own(
    tmp_path: Path, settings: dict[str, object], machine: float, own: list[float], share: float
) -> None:
    run = FakeRun("a", settings, [{"forward": 0.01}] * len(own), nodes=len(own))
    opened = open_run(run_beside_others(tmp_path, run, machine, own))
    assert other_processes_share(opened) == pytest.approx(share)


@pytest.mark.parametrize(("machine_percent", "is_told"), [(100.0, True), (35.0, False)])
def test_a_busy_machine_is_told_with_the_answer_and_a_quiet_one_is_not(
    tmp_path: Path, machine_percent: float, is_told: bool
) -> None:
    slow = FakeRun("a", {"lr": 0.01}, [{"forward": 0.02}])
    fast = FakeRun("b", {"lr": 0.02}, [{"forward": 0.01}])
    run_beside_others(tmp_path, slow, machine_percent, [60.0])
    run_beside_others(tmp_path, fast, 55.0, [100.0])
    verdict = make_verdict(collect(tmp_path).groups)
    message = [point.text for point in findings(verdict) if point.subject == "CPU contention"]
    if is_told:
        assert "Other processes used up to 70.0% of the CPU" in headline(verdict)
        assert "during lr 0.01 (70.0%). Contention" in message[0]
    else:
        assert "Other processes" not in headline(verdict)
        assert message == []


def one_waits_for_the_other(name: str, **settings: object) -> FakeRun:
    """Rank 1 computes 40 ms, rank 0 18 ms and waits: a straggler on a quiet machine."""
    waiting = {"forward": 0.010, "backward": 0.008, "wait": 0.022}
    return FakeRun(name, dict(settings), [waiting, {"forward": 0.040}])


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_busy_machine_explains_a_straggler(tmp_path: Path, is_busy: bool) -> None:
    run_beside_others(tmp_path, one_waits_for_the_other("a"), 100.0 if is_busy else 12.0, [22.0])
    verdict = make_verdict(collect(tmp_path).groups)
    assert bool(verdict.stragglers) != is_busy
    assert any("--shares auto" in step for step in next_steps(verdict)) != is_busy
    if is_busy:
        assert next_steps(verdict)[0].startswith("Rerun on a quiet machine: other processes")
        assert "89.0%" in next_steps(verdict)[0]
        assert "rerun on a quiet machine before drawing conclusions" in headline(verdict)


def test_a_worker_that_was_slowed_down_on_purpose_is_named_on_a_busy_machine_too(
    tmp_path: Path,
) -> None:
    run_beside_others(tmp_path, one_waits_for_the_other("a", slow="1=2"), 100.0, [22.0])
    assert [one.rank for one in make_verdict(collect(tmp_path).groups).stragglers] == [1]


def test_a_busy_machine_leads_to_no_bottleneck_and_no_advice_about_it(tmp_path: Path) -> None:
    phases = [{"forward": 0.010, "backward": 0.008, "exchange": 0.060}] * 2
    settings = {"nnodes": 2, "nproc_per_node": 1, "strategy": "ring"}
    run = FakeRun("a", settings, phases, nodes=2)
    run_beside_others(tmp_path, run, 100.0, [22.0, 22.0])
    verdict = make_verdict(collect(tmp_path).groups)
    assert verdict.bottlenecks == []
    assert len(next_steps(verdict)) == 1, "nothing but to rerun"


@pytest.mark.parametrize(("machine_percent", "is_explained"), [(100.0, False), (17.0, True)])
def test_a_difference_on_a_busy_machine_is_not_explained_by_phases(
    machine_percent: float, is_explained: bool, tmp_path: Path
) -> None:
    for name, forward, lr in (("a", 0.010, 0.01), ("b", 0.020, 0.02)):
        run = FakeRun(name, {"lr": lr}, [{"forward": forward, "backward": 0.008}])
        run_beside_others(tmp_path, run, machine_percent, [33.0])
    verdict = make_verdict(collect(tmp_path).groups)
    assert ("Why" in [point.subject for point in findings(verdict)]) == is_explained


def test_a_quiet_cell_beside_a_disturbed_one_has_its_bottleneck(tmp_path: Path) -> None:
    run_beside_others(tmp_path, FakeRun("a", {"lr": 0.01}), 100.0, [22.0])
    run_beside_others(tmp_path, FakeRun("b", {"lr": 0.02}), 12.0, [22.0])
    assert [one.label for one in make_verdict(collect(tmp_path).groups).bottlenecks] == ["lr 0.02"]


def test_a_node_with_less_cpu_time_on_purpose_is_named_on_a_busy_machine_too(
    tmp_path: Path,
) -> None:
    settings = {"nnodes": 2, "nproc_per_node": 1, "cluster": "nodes=2,slow=1:0.5"}
    run = one_waits_for_the_other("a", **settings)
    run.nodes = 2
    run_beside_others(tmp_path, run, 100.0, [22.0, 22.0])
    (found,) = make_verdict(collect(tmp_path).groups).stragglers
    assert (found.node, found.is_injected) == (1, True)
