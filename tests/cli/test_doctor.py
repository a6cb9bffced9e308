"""`paceline doctor`: findings that fit a terminal, and an exit code that tells whether to train."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.cli import doctor, main


def finding(findings: list[doctor.Finding], name: str) -> doctor.Finding:
    return next(item for item in findings if item.name == name)


def test_a_machine_that_runs_the_tests_can_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--out", str(tmp_path)]) == 0
    assert "Training can run here" in capsys.readouterr().out


def test_the_table_fits_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["doctor", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines == [line.rstrip() for line in lines]


def test_an_output_folder_that_cannot_be_written_blocks_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--json", "--out", str(tmp_path / "file")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] is False
    blocking = [item["name"] for item in report["findings"] if item["blocks_training"]]
    assert blocking == ["output folder"]


def test_an_output_folder_to_be_made_is_fine_and_is_not_made(tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet"
    assert finding(doctor.examine(out, None), "output folder").status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_without_torch_training_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--out", str(tmp_path)]) == 1
    assert "cannot run here until this is fixed: torch" in capsys.readouterr().out


def test_a_missing_tool_has_a_purpose_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tool = finding(doctor.examine(tmp_path, None), "srun")
    assert tool.status == "absent"
    assert "under SLURM" in tool.fact
    assert "SLURM cluster" in tool.advice


@pytest.mark.parametrize(
    ("name", "remedy"), [("ui", "paceline[ui]"), ("ray", "paceline[ray]"), ("C compiler", "gcc")]
)
def test_a_missing_optional_dependency_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    monkeypatch.setattr("paceline.emulation.latency.compiler", lambda: None)
    missing = finding(doctor.examine(tmp_path, None), name)
    assert missing.status == "absent"
    assert remedy in missing.advice
    assert not missing.blocks_training


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "paceline.measure.gpus.describe_gpus", lambda: [{"name": "A GPU", "memory_bytes": None}]
    )
    (gpu,) = doctor._gpus(cuda=None, usable=0, nccl=False)
    assert gpu.status == "problem"
    assert "A GPU" in gpu.fact


def test_a_small_shared_memory_is_a_problem_that_does_not_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = type("Usage", (), {"free": 64 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    shared = doctor._shared_memory()
    assert shared.status == "problem"
    assert not shared.blocks_training
