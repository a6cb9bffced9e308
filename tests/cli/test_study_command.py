"""`paceline study` as users run it, once for real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from paceline.cli import main
from paceline.study.folder import StudyFolder
from paceline.study.runner import Outcome, Runner
from tests.support.study_files import TINY_BASE, write_study

STUDY = f"""
    title: Tiny
    {TINY_BASE.strip()}
    grid:
      way:
        - {{label: alone, seed: 1, tensorboard: true}}
        - {{label: too large a batch, batch_size: 33}}
"""


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["study", *words]) == code
    return capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_study_from_file_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell trains, one is refused; table, exit code, report and TensorBoard show it."""
    monkeypatch.chdir(tmp_path)
    path = str(write_study(tmp_path, STUDY))
    assert re.search(
        r"2 cells to run in studies/mine\nestimated time: at least \d+:\d\d of computation, .*\n$",
        shown(capsys, "run", path, "--dry-run"),
    )
    assert not (tmp_path / "studies").exists()
    out = shown(capsys, "run", path, code=1)
    assert "way-alone.r1 finished after" in out
    assert "way-too-large-a-batch.r1 failed after" in out
    folder = StudyFolder(tmp_path / "studies" / "mine")
    study = folder.read()
    assert [folder.status(cell) for cell in study.cells] == ["finished", "failed"]
    assert study.cells[1].trouble is not None
    assert "--batch-size: must be at most 32" in study.cells[1].trouble.cause
    assert (folder.path / "report.html").is_file()
    curves = EventMultiplexer().AddRunsFromDirectory(str(folder.cells)).Runs()
    assert list(curves) == ["way-alone.r1/tensorboard"]
    dry = shown(capsys, "run", path, "--dry-run")
    assert "1 cell to run in studies/mine\nestimated time: 0:" in dry


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--out", "my studies"],
        ["study", "run", "mine.yaml", "--only", "way-*", "--repeats", "2"],
    ],
    ids=["demo", "study run"],
)
def test_a_stopped_study_names_the_command_that_resumes_it(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def stop(self: Runner, only: str | None) -> Outcome:
        asked.append((self._folder.path, len(self._plan.study.cells), only))
        return Outcome(self._plan.study, is_stopped=True)

    monkeypatch.setattr(Runner, "run", stop)
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, STUDY)
    assert main(words) == 130
    message = re.fullmatch(r"paceline: stopped; resume with `(.*)`\n", capsys.readouterr().err)
    assert message
    # Two demos within a second would share a folder's name.
    monkeypatch.setattr("time.strftime", lambda *_: "another")
    assert main(shlex.split(message[1])[1:]) == 130
    assert asked[0] == asked[1]


def test_the_list_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "list")
    assert "first-look" in out
    assert "Street numbers on three nodes" in out


def test_show_prints_the_file_and_its_cells(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "show", "first-look", "--scale", "full")
    assert "title: Six strategies on two workers" in out
    assert "# 18 runs at scale full" in out
    assert "strategy-ddp.r3" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "first-lok"], "unknown study 'first-lok': did you mean first-look?"),
        (["run", "first-look", "--repeats", "0"], "--repeats: must be 1 to 1000, got '0'"),
        (["run", "none.yaml"], "cannot read none.yaml: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_request_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["study", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not list(tmp_path.iterdir())


def test_a_scale_that_a_file_does_not_have_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, STUDY)
    assert main(["study", "run", str(path), "--scale", "full", "--dry-run"]) == 2
    assert "the study has no scales: omit --scale" in capsys.readouterr().err


def test_a_dry_run_wraps_no_id_and_names_cells_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    label = "a rather long name " * 4
    text = f"include:\n  - {{label: {label}, data: mnist, data_dir: nowhere}}\n"
    out = shown(capsys, "run", str(write_study(tmp_path, text)), "--dry-run")
    assert f"{'a-rather-long-name-' * 4}".rstrip("-") + ".r1" in out.splitlines()
    assert "skipped: mnist is not in nowhere" in " ".join(out.split())
    assert "0 cells to run" in out
