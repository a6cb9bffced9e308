"""Tables of runs against the records they are made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.records import RunFolder
from tests.support.records import FakeRun, write_run

SMALL = ["--train-samples", "64", "--test-samples", "32", "--batch-size", "16", "--threads", "1",
         "--iterations", "6", "--sample-seconds", "0.1", "--quiet"]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunFolder:
    assert main(["train", *SMALL, "--out", str(tmp_path), "--name", "[bold]run"]) == 0
    assert str(tmp_path / "[bold]run") in "".join(capsys.readouterr().out.split())
    return RunFolder.open(tmp_path / "[bold]run")


@pytest.fixture
def other(tmp_path: Path) -> str:
    """The path of a run that `run` can be compared with."""
    return str(write_run(tmp_path, FakeRun("other")))


def test_names_are_shown_as_they_are(
    run: RunFolder, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(run.path), other]) == 0
    assert "[bold]run" in capsys.readouterr().out


def test_a_run_that_no_worker_reported_can_be_compared(
    run: RunFolder, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run.read_result()
    assert result is not None
    run.write_result({**result, "workers": [], "status": "failed"})
    assert main(["compare", str(run.path), other]) == 0
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["config", "final", "workers"])
def test_a_result_without_a_key_is_named_and_rejected(
    key: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(run.result_file.read_text())
    del values[key]
    run.result_file.write_text(json.dumps(values))
    assert main(["compare", str(run.path)]) == 2
    assert f"it has no {key}" in capsys.readouterr().err
