"""Other processes' part of the machine: told where it is worth telling, with the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.report.collection import collect
from paceline.report.disturbance import others_share
from paceline.report.run import open_run
from paceline.report.verdict import judge
from report.records import FakeRun, write_run


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
        # Two emulated ones are on one: together they use 80 % of it.
        ({"nnodes": 2, "cluster": "nodes=2"}, 90.0, [80.0, 80.0], 0.1),
    ],
)
def test_what_others_used_is_the_machines_use_without_the_runs_own(
    tmp_path: Path, settings: dict[str, object], machine: float, own: list[float], share: float
) -> None:
    run = FakeRun("a", settings, [{"forward": 0.01}] * len(own), nodes=len(own))
    opened = open_run(run_beside_others(tmp_path, run, machine, own))
    assert others_share(opened) == pytest.approx(share)


@pytest.mark.parametrize(("machine_percent", "is_told"), [(100.0, True), (35.0, False)])
def test_a_busy_machine_is_told_with_the_answer_and_a_quiet_one_is_not(
    tmp_path: Path, machine_percent: float, is_told: bool
) -> None:
    slow = FakeRun("a", {"lr": 0.01}, [{"forward": 0.02}])
    fast = FakeRun("b", {"lr": 0.02}, [{"forward": 0.01}])
    run_beside_others(tmp_path, slow, machine_percent, [60.0])
    run_beside_others(tmp_path, fast, 55.0, [100.0])
    verdict = judge(collect(tmp_path).cells)
    told = [point.text for point in verdict.points if point.subject == "Busy machine"]
    if is_told:
        assert "Other processes used up to 70.0 % of the machine" in verdict.headline
        assert "during lr 0.01 (70.0 %): differences" in told[0]
    else:
        assert "Other processes" not in verdict.headline
        assert told == []
