"""Plans from profiled scripts and from loops that called `paceline.join`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.plan.run_calibration import calibrate
from tests.plan.test_run_calibration import comm_record, phases
from tests.support.records import FakeRun, write_run

SCRIPT = "/home/user/train.py"
BUCKETS = [1_000_000, 3_400_000]
"""In the order of the backward pass."""
TENSORS = [3_000_000, 400_000, 1_000_000]


def write_script(
    root: Path, name: str, workers: int, batch: int, kind: str = "profile", **worker: Any
) -> Path:
    """A script whose workers compute `batch` samples each, and exchange gradients for 50 ms."""
    exchange = {"exchange": 0.05} if workers > 1 else {}
    command = ["torchrun", SCRIPT, "--batch-size", str(batch)]
    settings = {"command": command, **worker.pop("settings", {})}
    run = FakeRun(name, settings, [phases(batch, **exchange)] * workers, kind=kind)  # type: ignore[arg-type]
    path = write_run(root, run)
    result = json.loads((path / "result.json").read_text())
    for one in result["workers"]:
        one |= {"samples": batch * run.iterations - 3, **worker}
    (path / "result.json").write_text(json.dumps(result))
    return path


def ddp(buckets: Sequence[int] = BUCKETS, **more: Any) -> list[dict[str, Any]]:
    model = {
        "bucket_bytes": list(buckets), "bucket_cap_bytes": 25 * 2**20,
        "has_communication_hook": False,
    }  # fmt: skip
    return [{**model, **more}]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    write_script(root, "one-16", 1, 16)
    write_script(root, "one-64", 1, 64)
    write_script(root, "two", 2, 32, ddp=ddp())
    comm_record(root / "comm.json", nodes=1)
    return root


def test_a_profile_has_its_batches_buckets_and_workers(root: Path) -> None:
    found = calibrate([str(root)])
    assert (found.model, found.script) == ("train.py", "train.py")
    # The last bucket of the backward pass has the first tensors of the model.
    assert [each.size_bytes for each in found.gradients] == BUCKETS[::-1]
    assert not found.has_tensor_sizes
    assert [point.samples for point in found.compute] == [16, 64]
    assert [point.seconds for point in found.compute] == pytest.approx([0.026, 0.074])
    (run,) = found.runs
    assert (run.strategy, run.workers, run.hosts, run.samples) == ("ddp", 2, 1, 32)
    assert run.options == {}
    assert run.step_seconds == pytest.approx(0.042 + 0.05)


def test_time_outside_of_phases_counts_as_input(root: Path) -> None:
    path = root / "one-16" / "result.json"
    result = json.loads(path.read_text())
    result["workers"][0]["iteration_seconds"]["mean"] += 0.004
    path.write_text(json.dumps(result))
    first = calibrate([str(root)]).compute[0]
    assert first.phases["input"] == pytest.approx(0.004)
    assert first.seconds == pytest.approx(0.030)


def test_loops_of_the_same_script_add_tensor_sizes_and_strategies(root: Path) -> None:
    settings = {"strategy": "ring", "options": {}, "communicator": "torch"}
    write_script(root, "joined", 2, 32, "join", settings=settings, tensor_bytes=TENSORS)
    found = calibrate([str(root)])
    assert [each.size_bytes for each in found.gradients] == TENSORS
    assert found.has_tensor_sizes
    assert sorted(run.strategy for run in found.runs) == ["ddp", "ring"]
    # The loop of two workers adds its local batch.
    assert [point.samples for point in found.compute] == [16, 32, 64]


def test_the_recommendation_says_what_to_change_in_the_script(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", str(root), "--workers", "2", "--advise", "--strategy"]
    assert main([*arguments, "ddp", "-o", "bucket_mib=2"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"torchrun --nproc-per-node 2 {SCRIPT} --batch-size 32  # 32 samples per worker,"
        " bucket_cap_mb=2" in printed
    )
    assert "buckets of DistributedDataParallel stand" in printed
    assert main([*arguments, "ring"]) == 0
    assert "# 32 samples per worker, paceline.join('ring')" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"workers": 2, "ddp": ddp()}, "compute time is not known: add a run with one worker"),
        ({"workers": 1}, "size of the gradients is not known: add a profile with Distributed"),
        ({"workers": 2}, "do not use DistributedDataParallel: profile it with one worker, or plan"),
        ({"workers": 2, "ddp": ddp(has_communication_hook=True)}, "it has a communication hook"),
        ({"workers": 1, "samples": 0}, "samples of a step were not counted: iterate over a Data"),
    ],
)
def test_what_a_script_does_not_tell_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: dict[str, Any], message: str
) -> None:
    write_script(tmp_path, "script", run.pop("workers"), 32, **run)
    assert main(["plan", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_scripts_that_differ_are_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_script(root, "larger", 2, 32, ddp=ddp([5_000_000]))
    assert main(["plan", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "different models: train.py with 4,400,000 bytes of gradients and train.py" in line
    events = other / "events-0.jsonl"
    facts = {"event": "facts", "steps": 100, "threads": 2, "time": 1.0, "cpu_seconds": 1.0}
    events.write_text(events.read_text() + json.dumps(facts) + "\n")
    one = root / "one-16" / "events-0.jsonl"
    one.write_text(one.read_text() + json.dumps({**facts, "threads": 1}) + "\n")
    assert main(["plan", str(root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "different numbers of threads: 1 and 2: give runs with the same --threads" in line
