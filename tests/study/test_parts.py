"""The small parts of running studies: folder, lock, words of a command, estimates, lines shown."""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from paceline.analysis.run import open_run
from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.config import from_mapping
from paceline.errors import RecordsError, UsageError
from paceline.formatting import format_duration
from paceline.study import catalogue, duration
from paceline.study.cells import load
from paceline.study.folder import Cell, CellFailure, Part, Study, StudyFolder, rows
from paceline.study.progress import BarDisplay, LineDisplay, choose
from paceline.study.runner import CellProcess, last_error_line, train_argv
from tests.support.records import FakeRun, write_asynchronous, write_run
from tests.support.study_files import planned, pretend_run

LIMIT_SECONDS = 60.0


def cell(
    name: str, part: str = "one", repeat: int = 1, elapsed_seconds: float | None = None
) -> Cell:
    return Cell(
        id=f"{name}.r{repeat}",
        part=part,
        group=name,
        label=name,
        repeat=repeat,
        axes={},
        settings={},
        run=f"{name}.r{repeat}",
        elapsed_seconds=elapsed_seconds,
    )


def test_a_study_is_read_as_it_was_written(tmp_path: Path) -> None:
    part = Part("one", "One", "why?", "", ("verdict",), {"seed": ("1", "2")})
    failed = Cell(
        "a.r1",
        "one",
        "a",
        "A",
        1,
        {"seed": "1"},
        {"seed": 1},
        "a.r1",
        2.5,
        CellFailure("failed", "x"),
    )
    study = Study("mine", "full", "Mine", "what?", (), (part,), (failed, cell("b")))
    folder = StudyFolder(tmp_path / "deep" / "study")
    folder.write(study)
    assert folder.read() == study


@pytest.mark.parametrize("text", ['{"schema": 1, "name": "x"}', '{"schema": 1}', "{", "[]"])
def test_a_damaged_study_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(RecordsError) as caught:
        StudyFolder(tmp_path).read()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("run", ["../elsewhere", "..", "", "/etc", "a/b"])
def test_no_cell_leads_out_of_its_study(run: str, tmp_path: Path) -> None:
    part = Part("one", "One", "", "", (), {})
    StudyFolder(tmp_path).write(
        Study("mine", "", "Mine", "", (), (part,), (replace(cell("a"), run=run),))
    )
    with pytest.raises(RecordsError, match="is not a study"):
        StudyFolder(tmp_path).read()


def test_a_second_runner_is_rejected_in_one_line(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    owner = re.escape(f"process {os.getpid()} on {socket.gethostname()}")
    refusal = f"is in use by {owner}: wait for it, or choose another --out"
    with folder.locked(), pytest.raises(UsageError, match=refusal), folder.locked():
        pass
    with folder.locked():
        pass


def test_the_lock_ends_with_its_owner(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from paceline.study import folder\n"
        "with folder.StudyFolder(Path(sys.argv[1])).locked(): print(flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with (
            pytest.raises(UsageError, match=f"process {owner.pid}"),
            StudyFolder(tmp_path).locked(),
        ):
            pass
        owner.kill()
    with StudyFolder(tmp_path).locked():
        pass


def test_a_cell_that_outlives_its_runner_keeps_the_folder_until_it_ends(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    with folder.locked():
        process = CellProcess(["-c", "import time; time.sleep(60)"], tmp_path / "log.txt")
    try:
        with pytest.raises(UsageError, match="in use by another process"), folder.locked():
            pass
    finally:
        process.stop()
    with folder.locked():
        pass


@pytest.mark.parametrize("name", catalogue.names())
def test_the_command_of_a_cell_has_its_settings(name: str) -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    parser.add_argument("--quiet", action="store_true")
    for config in load(catalogue.find(name), "full").configs.values():
        words = train_argv(config)
        assert words[:3] == ["-m", "paceline", "train"]
        assert from_mapping(given_flags(parser.parse_args(words[3:]))) == config


def test_a_cell_gets_sigterm_when_its_runner_is_killed(tmp_path: Path) -> None:
    message = tmp_path / "message"
    program = (
        "import signal, sys, time\n"
        "def stop(*_): open(sys.argv[1], 'w').close(); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop); print(flush=True); time.sleep(60)"
    )
    runner = (
        "import signal, subprocess, sys\n"
        "from paceline.child_process import tied_command\n"
        "command = tied_command(signal.SIGTERM, [sys.executable, '-c', *sys.argv[1:]])\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", runner, program, str(message)], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        child.wait(LIMIT_SECONDS)
    assert message.exists()


def test_a_cell_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.study.runner.STOP_SECONDS", 0.2)
    deaf = tmp_path / "deaf.py"
    deaf.write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = CellProcess([str(deaf)], tmp_path / "log.txt")
    begin = time.monotonic()
    while (
        last_error_line(tmp_path / "log.txt") != "deaf" and time.monotonic() - begin < LIMIT_SECONDS
    ):
        time.sleep(0.05)
    assert process.wait(0.0, lambda spent: None) is None
    process.stop()
    assert process._process.poll() == -signal.SIGKILL


def test_the_first_error_line_of_a_log_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a\npaceline: error: the cause\npaceline: error: its echo\nb\n")
    assert last_error_line(log) == "the cause"
    log.write_text("one\nkilled\n\n")
    assert last_error_line(log) == "killed"
    assert last_error_line(tmp_path / "none") == ""


def test_an_estimate_comes_from_repeats_then_the_part_then_all() -> None:
    done = [cell("a", elapsed_seconds=10), cell("b", elapsed_seconds=30), cell("c")]
    assert duration.seconds_of(cell("a", repeat=2), done) == 10
    assert duration.seconds_of(cell("c"), done) == 20
    assert duration.seconds_of(cell("d", part="two"), done) == 20
    assert duration.seconds_of(cell("a"), [cell("a")]) is None
    assert duration.seconds_of_all([cell("a", repeat=2), cell("c")], done) == 30
    assert duration.seconds_of_all([cell("a")], []) is None


def test_seconds_read_as_a_clock() -> None:
    assert [format_duration(value) for value in (None, 0, 75.4, 3661)] == [
        "unknown",
        "0:00",
        "1:15",
        "1:01:01",
    ]


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with choose(Console(force_terminal=False)) as display:
        assert type(display) is LineDisplay
        display.begin("a.r1", 1, 2, None)
        display.tick(1.0, None)
        display.end("a.r1", "finished", 1.25, "")
        display.begin("b.r1", 2, 2, 90.0)
        display.end("b.r1", "failed", 2.0, "no [room]")
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] a.r1 ...",
        "[1/2] a.r1 finished after 1.2 s",
        "[2/2] b.r1 ... (about 1:30 left)",
        "[2/2] b.r1 failed after 2.0 s: no [room]",
    ]


def test_on_a_terminal_a_bar_shows_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    with choose(Console(force_terminal=True, width=100)) as display:
        assert type(display) is BarDisplay
        display.begin("a.r1", 1, 2, 90.0)
        display.end("a.r1", "finished", 1.0, "")
    shown = capsys.readouterr().out
    assert "a.r1 0:00, about 1:30 left" in shown
    assert "a.r1 finished after 1.0 s" in shown


def step_seconds(path: Path) -> float | None:
    return open_run(path).iteration_seconds


def test_a_summary_puts_repeats_together(tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}", repeats=2)
    folder = StudyFolder(tmp_path / "study")
    write_run(folder.cells, FakeRun("batch_size-8.r1", accuracy=0.5))
    (row,) = rows(folder, plan.study, step_seconds)
    assert (row.label, row.status) == ("batch size 8", "1 finished, 1 waiting")
    assert row.accuracies == (0.5,)
    assert row.iteration_seconds == pytest.approx((0.02,))


def test_a_summary_has_the_step_time_of_an_asynchronous_run_that_the_report_has(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    folder = StudyFolder(tmp_path / "study")
    write_asynchronous(folder.cells, "batch_size-8.r1")
    (row,) = rows(folder, plan.study, step_seconds)
    assert row.iteration_seconds == pytest.approx((0.010,))


def test_a_summary_calls_a_strange_result_damaged(tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    folder = StudyFolder(tmp_path / "study")
    pretend_run(folder, "batch_size-8.r1", plan.configs["batch_size-8.r1"])
    (row,) = rows(folder, plan.study, step_seconds)
    assert (row.status, row.accuracies) == ("damaged", ())


def test_planning_a_study_does_not_import_torch() -> None:
    program = "import sys, paceline.study.cells, paceline.study.progress\n"
    program += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
