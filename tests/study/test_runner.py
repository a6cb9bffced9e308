"""Which cells are run, which are left alone, and what becomes of those that break.

The commands are played by a stand-in that leaves the records that a run would leave.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.config import from_mapping
from paceline.errors import RecordsError, UsageError
from paceline.study import runner
from paceline.study import runner as machine
from paceline.study.cells import Plan
from paceline.study.folder import StudyFolder
from paceline.study.progress import LineDisplay
from paceline.study.runner import Outcome, Runner, State, state_of
from paceline.training.checkpoint import CheckpointStore, newest_checkpoint
from tests.support.study_files import planned, pretend_run

TWO_CELLS = """
    grid: {batch_size: [8, 16]}
"""


def flags_of(words: list[str]) -> dict[str, Any]:
    """The settings that a cell's command gives; nothing where it resumes."""
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return given_flags(parser.parse_known_args(words)[0])


class Stage:
    """Plays the commands of cells: `acts` says what becomes of a run, by its name."""

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        self.commands: list[list[str]] = []
        self.acts: dict[str, str | int | BaseException | None] = {}
        """A status that the run ends with; a code that it is refused with; what interrupts it, or
        the signal that comes meanwhile;
        None: it never ends."""
        self.stops = 0

    def start(self, words: list[str], log: Path, *_: object) -> Stage:
        self.commands.append(words)
        self._log = log
        return self

    def wait(self, limit_seconds: float, tick: Callable[[float], None]) -> int | None:
        words = self.commands[-1]
        name = self.names[-1]
        act = self.acts.get(name, "finished")
        self._log.parent.mkdir(exist_ok=True)
        self._log.write_text("something\npaceline: error: refused for a reason\n")
        if isinstance(act, BaseException):
            raise act
        if isinstance(act, signal.Signals):
            signal.raise_signal(act)
        if act is None or isinstance(act, int):
            if "--resume" in words:
                self.acts.pop(name)
            return act
        run = self.folder.cells / name
        if "--resume" in words:
            run.rename(run.with_name("before"))
        pretend_run(self.folder, name, from_mapping(flags_of(words)), act)
        return 0 if act == "finished" else 1

    def stop(self) -> None:
        self.stops += 1

    @property
    def names(self) -> list[str]:
        """Of the cells whose commands were started."""
        return [
            Path(words[-1]).name if "--resume" in words else str(flags_of(words)["name"])
            for words in self.commands
        ]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(StudyFolder(tmp_path / "study"))
    monkeypatch.setattr(runner, "CellProcess", stage.start)
    return stage


def run(stage: Stage, plan: Plan, only: str | None = None) -> Outcome:
    return Runner(plan, stage.folder, LineDisplay(Console(quiet=True))).run(only)


def checkpoint(stage: Stage, name: str) -> None:
    folder = stage.folder.cells / name / "checkpoints"
    folder.mkdir()
    (folder / "iteration-00000003.pt").touch()


def test_all_cells_run_and_are_recorded(stage: Stage, tmp_path: Path) -> None:
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert stage.names == ["batch_size-8.r1", "batch_size-16.r1"]
    assert outcome.exit_code == 0
    study = stage.folder.read()
    assert study == outcome.study
    assert [stage.folder.status(cell) for cell in study.cells] == ["finished", "finished"]
    assert all(cell.elapsed_seconds is not None for cell in study.cells)


def test_finished_cells_are_not_run_again(stage: Stage, tmp_path: Path) -> None:
    run(stage, planned(tmp_path, TWO_CELLS))
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert len(stage.commands) == 2
    assert outcome.exit_code == 0


def test_more_repeats_run_only_the_new_ones(stage: Stage, tmp_path: Path) -> None:
    run(stage, planned(tmp_path, TWO_CELLS))
    run(stage, planned(tmp_path, TWO_CELLS, repeats=2))
    assert stage.names[2:] == ["batch_size-8.r2", "batch_size-16.r2"]


def test_a_cell_with_changed_settings_reruns_and_keeps_the_old_run(
    stage: Stage, tmp_path: Path
) -> None:
    text = "base: {lr: %s}\ngrid: {batch_size: [8]}"
    run(stage, planned(tmp_path, text % 0.1))
    run(stage, planned(tmp_path, text % 0.2))
    assert len(stage.commands) == 2
    assert (stage.folder.aside / "batch_size-8.r1~1" / "result.json").exists()


def test_a_changed_title_does_not_rerun_cells(stage: Stage, tmp_path: Path) -> None:
    run(stage, planned(tmp_path, TWO_CELLS))
    run(stage, planned(tmp_path, f"{TWO_CELLS}\n    title: another"))
    assert len(stage.commands) == 2


def test_a_diverged_run_is_a_result(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = "diverged"
    assert run(stage, planned(tmp_path, TWO_CELLS)).exit_code == 0
    run(stage, planned(tmp_path, TWO_CELLS))
    assert len(stage.commands) == 2


def test_a_failed_cell_does_not_stop_others_and_has_a_cause(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = 2
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert stage.names == ["batch_size-8.r1", "batch_size-16.r1"]
    assert outcome.exit_code == 1
    (failed,) = outcome.failed
    assert failed.trouble is not None
    assert failed.trouble.cause == "refused for a reason"
    assert stage.folder.status(failed) == "failed"


def test_a_failed_cell_is_tried_again(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = "failed"
    run(stage, planned(tmp_path, TWO_CELLS))
    stage.acts.clear()
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert stage.names[2:] == ["batch_size-8.r1"]
    assert outcome.exit_code == 0
    assert (stage.folder.aside / "batch_size-8.r1~1").is_dir()


def test_a_failure_is_cleared_when_the_retry_is_stopped(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = 2
    run(stage, planned(tmp_path, TWO_CELLS))
    stage.acts["batch_size-8.r1"] = KeyboardInterrupt()
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert (outcome.exit_code, outcome.failed) == (130, [])


def test_a_write_error_is_one_line(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RecordsError, match=r"cannot write to .*study: No space left on device"):
        run(stage, planned(tmp_path, TWO_CELLS))


def test_a_cell_over_its_time_limit_has_failed(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = None
    outcome = run(stage, planned(tmp_path, f"{TWO_CELLS}\n    time_limit_minutes: 2"))
    (failed,) = outcome.failed
    assert failed.trouble is not None
    assert failed.trouble.cause == "stopped after the time limit of 2:00"
    assert stage.stops == 2


def test_an_interrupted_cell_resumes_from_its_checkpoint(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    pretend_run(stage.folder, "batch_size-8.r1", plan.configs["batch_size-8.r1"], "stopped")
    checkpoint(stage, "batch_size-8.r1")
    run(stage, plan)
    ((*_, flag, folder),) = stage.commands
    assert (flag, folder) == ("--resume", str(stage.folder.cells / "batch_size-8.r1"))


def test_without_a_usable_checkpoint_a_cell_begins_again(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    pretend_run(stage.folder, "batch_size-8.r1", plan.configs["batch_size-8.r1"], None)
    checkpoint(stage, "batch_size-8.r1")
    stage.acts["batch_size-8.r1"] = 2
    outcome = run(stage, plan)
    assert ["--resume" in words for words in stage.commands] == [True, False]
    assert outcome.exit_code == 0
    assert (stage.folder.aside / "batch_size-8.r1~1").is_dir()


def test_a_rejected_resume_with_valid_checkpoints_does_not_restart(
    stage: Stage, tmp_path: Path
) -> None:
    """Exit code 2 may also mean a syntax error in a user's model or a host that is down."""
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    name = "batch_size-8.r1"
    run_folder = pretend_run(stage.folder, name, plan.configs[name], None)
    CheckpointStore(run_folder.checkpoints, 2, "sync").save(3, {"iteration": 3})
    stage.acts[name] = 2
    outcome = run(stage, plan)
    assert ["--resume" in words for words in stage.commands] == [True]
    assert not stage.folder.aside.exists()
    assert newest_checkpoint(run_folder.checkpoints) is not None
    (failed,) = outcome.failed
    assert failed.trouble is not None
    assert failed.trouble.cause == "refused for a reason"


def test_a_cell_with_unreadable_checkpoints_does_not_restart(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives an error now may be back later: only damage is final."""
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    name = "batch_size-8.r1"
    run_folder = pretend_run(stage.folder, name, plan.configs[name], None)
    CheckpointStore(run_folder.checkpoints, 2, "sync").save(3, {"iteration": 3})
    stage.acts[name] = 2

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", fail)
    assert run(stage, plan).exit_code == 1
    assert ["--resume" in words for words in stage.commands] == [True]
    assert not stage.folder.aside.exists()


def test_a_killed_cell_without_checkpoint_begins_again(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    config = plan.configs["batch_size-8.r1"]
    pretend_run(stage.folder, "batch_size-8.r1", config, None)
    assert state_of(stage.folder, plan.study.cells[0], config) is State.RERUN


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("auto", False, State.DONE),
        ("cpu", True, State.DONE),
        # Auto may choose another precision there.
        ("auto", True, State.RERUN),
    ],
)
def test_a_cell_that_a_version_without_auto_finished_on_a_cpu_is_done(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    has_gpu: bool,
    expected: State,
) -> None:
    monkeypatch.setattr(machine, "_has_gpu", lambda: has_gpu)
    plan = planned(tmp_path, f"grid: {{batch_size: [8], device: [{device}]}}")
    [(name, config)] = plan.configs.items()
    assert (config.precision, config.channels_last) == ("auto", "auto")
    before = dataclasses.replace(config, precision="fp32", channels_last="off")
    pretend_run(stage.folder, name, before)
    assert state_of(stage.folder, plan.study.cells[0], config) is expected


def test_ctrl_c_stops_the_cell_and_the_study(stage: Stage, tmp_path: Path) -> None:
    stage.acts["batch_size-8.r1"] = KeyboardInterrupt()
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert outcome.exit_code == 130
    assert stage.names == ["batch_size-8.r1"]
    assert stage.stops == 1
    stage.acts.clear()
    assert run(stage, planned(tmp_path, TWO_CELLS)).exit_code == 0


def test_cells_that_the_machine_cannot_run_are_skipped_by_name(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine, "missing_requirement", lambda config: "no GPU" if config.batch_size == 8 else None
    )
    outcome = run(stage, planned(tmp_path, TWO_CELLS))
    assert stage.names == ["batch_size-16.r1"]
    assert [cell.id for cell in outcome.skipped] == ["batch_size-8.r1"]
    assert outcome.exit_code == 0
    assert stage.folder.status(stage.folder.read().cells[0]) == "skipped"


def test_a_pattern_chooses_cells_and_the_study_keeps_all(stage: Stage, tmp_path: Path) -> None:
    outcome = run(stage, planned(tmp_path, TWO_CELLS), only="*-16.*")
    assert stage.names == ["batch_size-16.r1"]
    assert len(outcome.study.cells) == 2
    assert run(stage, planned(tmp_path, TWO_CELLS), only="size-8").ran == 1


def test_a_pattern_without_matches_is_rejected(stage: Stage, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--only ddp: no cell has this name"):
        run(stage, planned(tmp_path, TWO_CELLS), only="ddp")


TWO_PARTS = """
    base: {batch_size: 8}
    parts:
      one: {}
      two: {grid: {batch_size: [8]}}
"""


def test_one_run_serves_the_cells_of_two_parts(stage: Stage, tmp_path: Path) -> None:
    outcome = run(stage, planned(tmp_path, TWO_PARTS), only="two*")
    assert stage.names == ["one.r1"]
    assert [stage.folder.status(cell) for cell in outcome.study.cells] == ["finished"] * 2


def test_a_run_that_failed_has_failed_in_both_parts(stage: Stage, tmp_path: Path) -> None:
    stage.acts["one.r1"] = 2
    outcome = run(stage, planned(tmp_path, TWO_PARTS))
    assert [stage.folder.status(cell) for cell in outcome.study.cells] == ["failed"] * 2
    assert [cell.id for cell in outcome.failed] == ["one.r1"]


def test_a_folder_of_another_study_is_rejected(stage: Stage, tmp_path: Path) -> None:
    run(stage, planned(tmp_path, f"{TWO_CELLS}\n    scales: {{quick: {{repeats: 1}}}}"))
    with pytest.raises(UsageError, match="has study mine at scale quick: choose another --out"):
        run(stage, planned(tmp_path, TWO_CELLS))


def test_a_missing_gpu_is_a_missing_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_gpu", lambda: False)
    assert (
        machine.missing_requirement(from_mapping({"device": "cuda"})) == "no GPU that torch can use"
    )
    assert machine.missing_requirement(from_mapping({"device": "auto"})) is None


def test_missing_emulation_is_a_missing_requirement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_emulation_error", lambda: "run as root")
    config = from_mapping({"cluster": "nodes=2", "strategy": "ddp"})
    assert machine.missing_requirement(config) == "no emulated cluster: run as root"


def test_missing_data_is_a_missing_requirement_with_the_fetch_command(tmp_path: Path) -> None:
    config = from_mapping({"data": "mnist", "data_dir": str(tmp_path)})
    assert (
        machine.missing_requirement(config)
        == f"mnist is not in {tmp_path}: paceline data fetch mnist"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_a_study_whose_shell_ignores_them(
    number: signal.Signals, stage: Stage, tmp_path: Path
) -> None:
    """A shell without job control starts what it puts in the background with SIGINT ignored."""
    before = signal.signal(number, signal.SIG_IGN)
    stage.acts["batch_size-8.r1"] = number
    try:
        assert run(stage, planned(tmp_path, TWO_CELLS)).is_stopped
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_cell_that_another_process_runs_is_not_moved_away(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, TWO_CELLS)
    name = "batch_size-8.r1"
    live = pretend_run(stage.folder, name, plan.configs[name], None)
    with live.locked():
        outcome = run(stage, plan)
    assert live.config_file.is_file()
    assert stage.names == ["batch_size-16.r1"]
    (failed,) = outcome.failed
    assert failed.trouble is not None
    assert "is in use by process" in failed.trouble.cause


def test_a_cell_with_a_damaged_result_and_a_checkpoint_is_resumed(
    stage: Stage, tmp_path: Path
) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    config = plan.configs["batch_size-8.r1"]
    folder = pretend_run(stage.folder, "batch_size-8.r1", config)
    folder.result_file.write_text("{")
    checkpoint(stage, "batch_size-8.r1")
    assert state_of(stage.folder, plan.study.cells[0], config) is State.RESUME


def test_a_cell_of_a_newer_schema_fails_and_is_kept(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, TWO_CELLS)
    name = "batch_size-8.r1"
    newer = pretend_run(stage.folder, name, plan.configs[name], None)
    newer.config_file.write_text(newer.config_file.read_text().replace("1", "99", 1))
    outcome = run(stage, plan)
    assert newer.config_file.is_file()
    assert stage.names == ["batch_size-16.r1"]
    (failed,) = outcome.failed
    assert failed.trouble is not None
    assert "has schema 99, newer than this paceline's" in failed.trouble.cause


def test_checkpoints_of_a_newer_schema_are_not_started_over(stage: Stage, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid: {batch_size: [8]}")
    name = "batch_size-8.r1"
    folder = pretend_run(stage.folder, name, plan.configs[name], None)
    checkpoint(stage, name)
    checksums = {"schema": 99, "iteration": 3, "contents": []}
    (folder.checkpoints / "iteration-00000003.json").write_text(json.dumps(checksums))
    stage.acts[name] = 2
    outcome = run(stage, plan)
    assert len(stage.names) == 1
    assert [cell.id for cell in outcome.failed] == [name]
    assert folder.config_file.is_file()
