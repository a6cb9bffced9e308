"""Configurations that reports suggest to run next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.plan.next_runs import NextRuns, next_runs
from paceline.plan.run_calibration import calibrate
from paceline.records import write_json
from paceline.report.build import write_report
from tests.plan.test_run_calibration import comm_record, write


def found_in(root: Path) -> NextRuns | None:
    collection = collect(root)
    return next_runs(collection.runs, collection.comm)


def measure_buckets(path: Path, exchange_seconds_per_byte: float) -> None:
    """What `overlap` measures in its first steps."""
    file = path / "result.json"
    result = json.loads(file.read_text())
    for worker in result["workers"]:
        worker["buckets"] = {
            "count": 2, "bucket_mib": 2.0, "reason": "measured",
            "measurements": {
                "backward_seconds": 0.025, "ready_seconds": [0.022, 0.025],
                "latency_seconds": 1e-3, "seconds_per_byte": exchange_seconds_per_byte,
                "overlapped_seconds_per_byte": exchange_seconds_per_byte,
            },
        }  # fmt: skip
    file.write_text(json.dumps(result))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One worker is slower than two are predicted to be."""
    write(tmp_path, "one-16", 1, 16)
    write(tmp_path, "one-96", 1, 96)
    write(tmp_path, "two-tree", 2, 96, strategy="tree")
    comm_record(tmp_path / "comm.json")
    return tmp_path


def test_faster_configurations_are_found_with_their_gain(root: Path) -> None:
    found = found_in(root)
    assert found is not None
    assert (found.fastest.name, found.fastest.workers) == (str(root / "one-96"), 1)
    gains = [each.gain.median for each in found.found]
    assert gains
    assert min(gains) > 0.05
    for each in found.found:
        assert each.gain.low <= each.gain.median <= each.gain.high
        measured = found.fastest.samples * found.fastest.workers / found.fastest.step_seconds
        rate = each.prediction.throughput.median
        assert each.gain.median == pytest.approx(rate / measured - 1)
        assert f"--strategy {each.prediction.target.strategy}" in each.command


def test_measured_configurations_are_not_suggested(root: Path) -> None:
    before = found_in(root)
    assert before is not None
    best = before.found[0].prediction.target
    assert best.workers == 2
    write(root, "two-best", 2, 96, strategy=best.strategy)
    after = found_in(root)
    suggested = [each.prediction.target for each in after.found] if after else []
    assert (best.strategy, 2) not in [(each.strategy, each.workers) for each in suggested]


def test_a_run_that_tuned_its_buckets_is_planned_from_itself(tmp_path: Path) -> None:
    """Its step takes 92 ms, 50 of them exposed communication."""
    path = write(tmp_path, "overlap", 2, 64, strategy="overlap")
    assert found_in(tmp_path) is None
    measure_buckets(path, 1e-8)
    known = calibrate([str(tmp_path)])
    (point,) = known.compute
    assert (point.samples, point.phases["backward"]) == (32, 0.025)
    (timing,) = known.collectives
    assert (timing.operation, timing.workers, timing.hosts) == ("all_reduce", 2, 2)
    assert known.has_ready_times
    assert found_in(tmp_path) is None  # no strategy hides more than overlap


def test_the_report_suggests_them_without_importing_torch(root: Path) -> None:
    code = (
        "import sys\nfrom paceline.report.build import write_report\n"
        f"write_report({str(root)!r})\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    text = (root / "report.md").read_text()
    steps = text[text.index("What to try next") : text.index("## Overview")]
    assert "a plan from these runs predicts +" in steps
    assert "`paceline train --model lenet --strategy " in steps
    (root / "comm.json").unlink()
    page = write_report(root).page
    assert "a plan from these runs predicts" not in page.read_text()


def test_commands_emulate_the_cluster_of_the_runs(root: Path) -> None:
    found = found_in(root)
    assert found is not None
    assert all(
        "--cluster nodes=2,cpus=0.5,bandwidth=1gbit,latency=200us" in each.command
        for each in found.found
        if each.prediction.target.workers == 2
    )


def test_other_strategies_need_no_shared_memory(tmp_path: Path) -> None:
    """Shared weights are the fastest measured strategy; others communicate with gloo."""
    for batch in (16, 96):
        write(tmp_path, f"one-{batch}", 1, batch, cluster=None)
    two = {"cluster": None, "nnodes": 1, "nproc_per_node": 2}
    write(tmp_path, "two", 2, 192, strategy="shared", **two)
    file = comm_record(tmp_path / "comm.json", nodes=1)
    record = {**json.loads(file.read_text()), "cluster": None}
    for one in record["measurements"]:
        one["samples_seconds"] = [each / 10 for each in one["samples_seconds"]]
    write_json(file, record)
    found = found_in(tmp_path)
    assert found is not None
    assert found.fastest.strategy == "shared"
    assert not any("--communicator" in each.command for each in found.found)


def test_nothing_is_predicted_from_contended_runs(root: Path) -> None:
    for file in root.glob("*/result.json"):
        result = json.loads(file.read_text())
        result["hardware"]["cores_in_machine"] = 2
        for node in result["nodes"]:
            node |= {"machine_cpu_percent_mean": 90.0, "cpu_percent_mean": 20.0}
        file.write_text(json.dumps(result))
    text = write_report(root).page.read_text()
    assert "Rerun on a quiet machine" in text
    assert "a plan from these runs predicts" not in text
