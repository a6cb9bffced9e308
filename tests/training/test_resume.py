"""A resumed run ends with exactly the weights of an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.run import open_run
from paceline.comm.communicator import Communicator
from paceline.config import from_mapping
from paceline.errors import CheckpointError, ConfigError, PeerError, RecordsError, RunError
from paceline.launch import launcher
from paceline.launch.result import RunOutcome
from paceline.models import MODELS, TOKEN_MODELS
from paceline.records import Result, RunFolder, read_lines
from paceline.training import checkpoint
from paceline.training.checkpoint import write_checkpoint
from paceline.training.step import TrainStep

SMALL: dict[str, Any] = {
    "train_samples": 40,
    "test_samples": 20,
    "batch_size": 8,
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
    "eval_every": "never",
    "iterations": 8,
    "augment": "crop,flip",
    "schedule": "cosine",
}


def result_of(outcome: RunOutcome) -> Result:
    assert outcome.result is not None
    return outcome.result


class PowerCut(BaseException):
    """Simulates a power failure: nothing catches it, so nothing is written after it."""


def uninterrupted(out: Path, **settings: Any) -> Result:
    config = from_mapping({**SMALL, "out": str(out), "name": "whole", **settings})
    return result_of(launcher.train(config, quiet=True))


def cut_after(
    out: Path, iteration: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> RunFolder:
    """Start the same run and interrupt it in the iteration after `iteration`."""
    config = from_mapping({**SMALL, "out": str(out), "name": "cut", **settings})
    with pytest.raises(PowerCut), power_cut_at(monkeypatch, iteration):
        launcher.train(config, quiet=True)
    return RunFolder.open(out / "cut")


@contextmanager
def power_cut_at(monkeypatch: pytest.MonkeyPatch, iteration: int) -> Iterator[None]:
    original = TrainStep.__call__

    def iterate(self: TrainStep, number: int, shard: int) -> Any:
        if number == iteration:
            raise PowerCut
        return original(self, number, shard)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", iterate)
        yield


def check_resumed_equals_whole(
    tmp_path: Path, iteration: int, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> None:
    whole = uninterrupted(tmp_path, **settings)
    folder = cut_after(tmp_path, iteration, monkeypatch, checkpoint_every=2, **settings)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["samples"] == whole["samples"]
    for figure in ("test_loss", "train_loss"):
        assert resumed["final"][figure] == whole["final"][figure]


@pytest.mark.parametrize(
    ("model", "data"), [("Height", "heights"), ("Tags", "tags"), ("Digits", "numbers")]
)
def test_resumed_run_with_own_loss_is_bit_identical(
    model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "tests.training.test_own_tasks"
    settings = {"model": f"{own}:{model}", "data": f"{own}:{data}", "augment": ()}
    check_resumed_equals_whole(tmp_path, 5, monkeypatch, test_samples=9, **settings)


@pytest.mark.parametrize(
    "model",
    [
        {"model": "tests.support.user_code:NextToken"},
        {"model": "gpt-nano", "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.1},
        {"model": "gpt-nano", "optimizer": "muon", "lr": 1e-3, "weight_decay": 0.1},
        {"model": "gpt-nano", "model_options": {"checkpoint": "true"}, "precision": "bf16"},
    ],
    ids=str,
)
def test_resumed_run_on_text_is_bit_identical(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 30)
    settings = {
        "data": f"text:{text}",
        "context": 16,
        "test_samples": 5,
        "augment": (),
        **model,
    }
    check_resumed_equals_whole(tmp_path, 5, monkeypatch, **settings)


@pytest.mark.parametrize("model", [name for name in MODELS.names() if name not in TOKEN_MODELS])
def test_resumed_run_is_bit_identical_for_every_model(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"iterations": 3, "batch_size": 2, "test_samples": 4}
    check_resumed_equals_whole(tmp_path, 2, monkeypatch, model=model, **few)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd", "nesterov": True},
        {"optimizer": "adam", "lr": 1e-3},
        {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        {"optimizer": "muon", "lr": 1e-3, "normalize": "image", "augment": "shift"},
        {"precision": "bf16"},
        {"precision": "fp16", "clip_norm": 1.0},
        {"checkpoint_mode": "background"},
        {"accumulate": 3, "channels_last": True},
        {"schedule": "one_cycle", "warmup_epochs": 1},
    ],
    ids=str,
)
def test_resumed_run_is_bit_identical_for_every_optimizer_and_mode(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_resumed_equals_whole(tmp_path, 5, monkeypatch, **settings)


@pytest.mark.parametrize("iteration", range(2, 8))
def test_run_resumes_after_an_interruption_at_any_iteration(
    iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch has five iterations: the run is interrupted within epochs and between them."""
    check_resumed_equals_whole(tmp_path, iteration, monkeypatch)


def test_killed_run_resumes_bit_identically(tmp_path: Path) -> None:
    settings = {**SMALL, "train_samples": 2000, "iterations": 700, "checkpoint_every": 20}
    flags = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in settings.items()
        if key != "tensorboard"
    ]
    command = [sys.executable, "-m", "paceline", "train", "--no-tensorboard", "--quiet",
               *flags, "--out", str(tmp_path), "--name", "killed"]  # fmt: skip
    process = subprocess.Popen(command)
    checkpoints = tmp_path / "killed" / "checkpoints"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(checkpoints.glob("*.json"))) < 2:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    resumed = result_of(launcher.resume(str(tmp_path / "killed"), {}, quiet=True))
    whole = result_of(
        launcher.train(
            from_mapping({**settings, "out": str(tmp_path), "name": "whole"}), quiet=True
        )
    )
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["iterations"] == 700


def test_ctrl_c_stops_cleanly_and_writes_a_checkpoint(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "paceline", "train", "--train-samples", "200", "--test-samples",
        "50", "--epochs", "100000", "--checkpoint-every", "100000", "--sample-seconds", "0.2",
        "--out", str(tmp_path), "--name", "stopped",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events = tmp_path / "stopped" / "events-0.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and '"iterations"' not in (
        events.read_text() if events.exists() else ""
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith("paceline: stopped by SIGINT after iteration")
    assert "Traceback" not in errors
    advice = f"paceline: resume with `paceline train --resume {tmp_path / 'stopped'}`\n"
    assert errors.endswith(advice)
    folder = RunFolder.open(tmp_path / "stopped")
    result = folder.read_result()
    assert result is not None
    assert result["status"] == "stopped"
    assert len(list(folder.checkpoints.glob("*.pt"))) == 1


@pytest.mark.parametrize(
    ("number", "checkpoints"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)], ids=["SIGTERM", "SIGINT"]
)
def test_only_a_second_ctrl_c_skips_the_last_checkpoint(
    number: signal.Signals, checkpoints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM sends SIGTERM twice at the time limit of a job, with time to write a checkpoint."""
    original = TrainStep.__call__

    def iterate(self: TrainStep, iteration: int, shard: int) -> Any:
        if iteration == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return original(self, iteration, shard)

    monkeypatch.setattr(TrainStep, "__call__", iterate)
    stopped = uninterrupted(tmp_path, checkpoint_every=100)
    assert stopped["status"] == "stopped"
    assert len(list((tmp_path / "whole" / "checkpoints").glob("*.pt"))) == checkpoints


class FailingWrites:
    """Checkpoint writes that fail for the first `failures` attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.attempts: list[int] = []
        self._failures = failures
        monkeypatch.setattr(checkpoint, "write_checkpoint", self.write)

    def write(self, folder: Path, iteration: int, state: Any) -> int:
        self.attempts.append(iteration)
        if len(self.attempts) <= self._failures:
            raise RunError("cannot write checkpoint: the disk hums")
        return write_checkpoint(folder, iteration, state)


def stop_during(iteration: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    iterate = TrainStep.__call__

    def iterate_and_stop(self: TrainStep, current: int, shard: int) -> Any:
        if current == iteration:
            os.kill(os.getpid(), number)
        return iterate(self, current, shard)

    monkeypatch.setattr(TrainStep, "__call__", iterate_and_stop)


def newest_iteration(out: Path) -> int | None:
    newest = checkpoint.newest_checkpoint(out / "whole" / "checkpoints")
    return newest.iteration if newest else None


def check_warned(result: Result, out: Path) -> None:
    assert any("the disk hums" in text for text in result["warnings"])
    events = list(read_lines(out / "whole" / "events-0.jsonl"))
    assert any("the disk hums" in event["text"] for event in events if event["event"] == "warning")


@pytest.mark.parametrize("failures", [1, 100], ids=["once", "always"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_failed_last_background_checkpoint_is_reported_and_written_again(
    failures: int, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = FailingWrites(monkeypatch, failures)
    stop_during(3, number, monkeypatch)
    stopped = uninterrupted(tmp_path, checkpoint_every=100, checkpoint_mode="background")
    assert stopped["status"] == "stopped"
    assert writes.attempts == [4, 4]
    check_warned(stopped, tmp_path)
    assert newest_iteration(tmp_path) == (4 if failures == 1 else None)


def test_finished_run_writes_a_failed_background_checkpoint_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = FailingWrites(monkeypatch, failures=1)
    finished = uninterrupted(tmp_path, checkpoint_every=8, checkpoint_mode="background")
    assert (finished["status"], writes.attempts) == ("finished", [8, 8])
    check_warned(finished, tmp_path)
    assert newest_iteration(tmp_path) == 8


def test_run_fails_if_its_last_background_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FailingWrites(monkeypatch, failures=100)
    failed = uninterrupted(tmp_path, checkpoint_every=8, checkpoint_mode="background")
    assert (failed["status"], failed["cause"]) == (
        "failed",
        "cannot write checkpoint: the disk hums",
    )
    check_warned(failed, tmp_path)


def test_no_checkpoint_is_written_after_failed_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of an operation on a GPU may be known only after its step."""

    def fail(_: Communicator) -> None:
        raise PeerError("no response")

    monkeypatch.setattr(Communicator, "synchronize", fail)
    failed = uninterrupted(tmp_path, checkpoint_every=4)
    assert (failed["status"], failed["cause"]) == ("failed", "no response")
    assert newest_iteration(tmp_path) is None


def test_background_checkpoint_is_written_again_after_another_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training fails, and the report then writes the pending checkpoint."""
    writes = FailingWrites(monkeypatch, failures=2)
    failed = uninterrupted(tmp_path, checkpoint_every=8, checkpoint_mode="background")
    assert (failed["status"], writes.attempts) == ("failed", [8, 8, 8])
    assert newest_iteration(tmp_path) == 8


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "finished"])
def test_failed_background_checkpoint_does_not_prevent_the_next_one(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = FailingWrites(monkeypatch, failures=1)
    if stops:
        stop_during(5, signal.SIGTERM, monkeypatch)
    ended = uninterrupted(tmp_path, checkpoint_every=4, checkpoint_mode="background")
    last = 6 if stops else 8
    assert ended["status"] == ("stopped" if stops else "finished")
    assert writes.attempts == [4, last]
    check_warned(ended, tmp_path)
    assert newest_iteration(tmp_path) == last


def test_resume_skips_a_damaged_newest_checkpoint_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted(tmp_path)
    folder = cut_after(tmp_path, 7, monkeypatch, checkpoint_every=2)
    newest = max(folder.checkpoints.glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert any(newest.name in text for text in resumed["warnings"])


def test_resumed_run_accepts_a_larger_budget(tmp_path: Path) -> None:
    uninterrupted(tmp_path, checkpoint_every=8)
    outcome = launcher.resume(str(tmp_path / "whole"), {"iterations": "12"}, quiet=True)
    folder, resumed = outcome.folder, result_of(outcome)
    assert resumed["iterations"] == 12
    assert (folder.path / "result-1.json").exists(), "the first result must be kept"
    starts = [e["iteration"] for e in read_lines(folder.events_file(0)) if e["event"] == "start"]
    assert starts == [0, 8]


def test_metrics_of_a_resumed_run_cover_the_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TrainStep.__call__

    def iterate(self: TrainStep, number: int, shard: int) -> Any:
        self.replica.hidden_exchange_seconds += 1.0
        return original(self, number, shard)

    monkeypatch.setattr(TrainStep, "__call__", iterate)
    settings = {"checkpoint_every": 2, "eval_every": 2}
    whole = uninterrupted(tmp_path, **settings)
    folder = cut_after(tmp_path, 5, monkeypatch, **settings)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["workers"][0]["hidden_exchange_seconds"] == 8.0
    assert resumed["checkpoints"]["count"] == whole["checkpoints"]["count"] == 4
    # Their measured times have different numbers of digits.
    assert resumed["checkpoints"]["bytes"] == pytest.approx(whole["checkpoints"]["bytes"], rel=0.05)
    events = list(read_lines(folder.events_file(0)))
    waits = [event["blocked_seconds"] for event in events if event["event"] == "checkpoint"]
    assert resumed["checkpoints"]["blocked_seconds"] >= sum(waits) - 1e-9
    walls = [event["wall_seconds"] for event in events if event["event"] == "evaluation"]
    assert walls == sorted(walls)


def test_larger_budget_is_kept_by_a_second_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second resume without flags continues to the larger budget of the first."""
    whole = uninterrupted(tmp_path, schedule="constant", iterations=12)
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2, schedule="constant")
    with pytest.raises(PowerCut), power_cut_at(monkeypatch, 9):
        launcher.resume(str(folder.path), {"iterations": "12"}, quiet=True)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["iterations"] == 12
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("change", [{"iterations": "8"}, {"checkpoint_keep": "1"}])
def test_rejected_resume_keeps_the_result_of_a_finished_run(
    change: dict[str, str], tmp_path: Path
) -> None:
    before = uninterrupted(tmp_path, checkpoint_every=8)
    with pytest.raises(CheckpointError, match="done all of its 8 iterations"):
        launcher.resume(str(tmp_path / "whole"), change, quiet=True)
    assert RunFolder.open(tmp_path / "whole").read_result() == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"iterations": "5"},
            "the run has done 8 iterations: --iterations must be more than that",
        ),
        (
            {"epochs": "1"},
            "the run has done 8 iterations (1.6 epochs): --epochs must be more than that",
        ),
    ],
)
def test_budget_below_the_completed_iterations_is_rejected(
    change: dict[str, str], line: str, tmp_path: Path
) -> None:
    before = uninterrupted(tmp_path, checkpoint_every=8)
    with pytest.raises(CheckpointError) as error:
        launcher.resume(str(tmp_path / "whole"), change, quiet=True)
    assert str(error.value) == line
    assert RunFolder.open(tmp_path / "whole").read_result() == before


def test_resume_of_a_finished_run_is_rejected(tmp_path: Path) -> None:
    uninterrupted(tmp_path, checkpoint_every=8)
    with pytest.raises(RecordsError, match="finished"):
        launcher.resume(str(tmp_path / "whole"), {}, quiet=True)


@pytest.mark.parametrize(
    "change", [{"model": "mlp"}, {"model_options": "width=2"}, {"batch_size": "16"}, {"seed": "9"}]
)
def test_change_of_a_fixed_setting_is_rejected(
    change: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    before = sorted(path.name for path in folder.path.rglob("*"))
    with pytest.raises(ConfigError, match="a resumed run keeps its"):
        launcher.resume(str(folder.path), change, quiet=True)
    assert sorted(path.name for path in folder.path.rglob("*")) == before


def test_resume_without_checkpoints_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch)
    with pytest.raises(CheckpointError, match="checkpoint"):
        launcher.resume(str(folder.path), {}, quiet=True)


def test_resume_of_a_folder_without_a_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="is not a run"):
        launcher.resume(str(tmp_path), {}, quiet=True)


def test_run_killed_before_its_first_checkpoint_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = uninterrupted(tmp_path)
    folder = cut_after(tmp_path, 3, monkeypatch, checkpoint_every=4)
    resumed = result_of(launcher.resume(str(folder.path), {}))
    assert resumed["status"] == "finished"
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    output = capsys.readouterr().err
    assert output == f"paceline: {folder.path} has no checkpoint yet: starting from iteration 0\n"
    starts = [e["iteration"] for e in read_lines(folder.events_file(0)) if e["event"] == "start"]
    assert starts == [0, 0]


def test_run_without_checkpoints_starts_over_with_checkpoint_every(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch)
    with pytest.raises(CheckpointError, match="set --checkpoint-every with --resume to restart it"):
        launcher.resume(str(folder.path), {}, quiet=True)
    result = result_of(launcher.resume(str(folder.path), {"checkpoint_every": "4"}, quiet=True))
    assert (result["status"], result["iterations"]) == ("finished", 8)
    assert folder.read_config().checkpoint_every == 4


def test_finished_run_without_a_checkpoint_never_starts_over(tmp_path: Path) -> None:
    before = uninterrupted(tmp_path, checkpoint_every=100)
    with pytest.raises(CheckpointError, match="is finished and has no checkpoint"):
        launcher.resume(str(tmp_path / "whole"), {"iterations": "12"}, quiet=True)
    assert RunFolder.open(tmp_path / "whole").read_result() == before


def edit_config(folder: RunFolder, **values: Any) -> None:
    record = json.loads(folder.config_file.read_text())
    record["config"] |= values
    folder.config_file.write_text(json.dumps(record))


def test_run_with_a_recorded_setting_outside_todays_range_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    edit_config(folder, timeout_seconds=1e6)
    resumed = result_of(launcher.resume(str(folder.path), {"iterations": "9"}, quiet=True))
    assert (resumed["status"], resumed["config"]["timeout_seconds"]) == ("finished", 1e6)
    assert resumed["iterations"] == 9
    assert open_run(folder.path).settings.get("timeout_seconds") == 1e6


def test_resume_warns_about_settings_edited_in_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2, lr=0.1)
    edit_config(folder, lr=0.5, out="elsewhere", checkpoint_keep=3)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    (warning,) = resumed["warnings"]
    assert warning.startswith("--lr is 0.5, but the checkpoint was written with 0.1:")


def test_resume_warns_about_a_batch_size_edited_in_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    edit_config(folder, batch_size=10)
    (warning,) = result_of(launcher.resume(str(folder.path), {}, quiet=True))["warnings"]
    assert warning.startswith("--batch-size is 10, but the checkpoint was written with 8:")


def snapshot(folder: RunFolder) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "value", "before"),
    [
        ("model", "mlp", "softmax"),
        ("data", "plain_digits", "digits"),
        ("optimizer", "adam", "sgd"),
        ("precision", "fp16", "fp32"),
    ],
)
def test_rejected_edited_setting_changes_no_file(
    name: str, value: str, before: str, tmp_path: Path
) -> None:
    uninterrupted(tmp_path, checkpoint_every=8, model="softmax", augment=[])
    folder = RunFolder.open(tmp_path / "whole")
    edit_config(folder, **{name: value})
    files = snapshot(folder)
    with pytest.raises(ConfigError) as error:
        launcher.resume(str(folder.path), {"iterations": "12"}, quiet=True)
    assert error.value.problems == (
        f"--{name} is {value!r} in config.json, but the checkpoint was written with {before!r}:"
        " restore it",
    )
    assert snapshot(folder) == files


def test_user_model_changed_since_the_checkpoint_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edited_model.py").write_text(
        "from torch import nn\n"
        "WIDTH = 4\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3072, WIDTH), nn.Linear(WIDTH, 10))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    uninterrupted(tmp_path, checkpoint_every=8, model="edited_model:net")
    monkeypatch.setattr("edited_model.WIDTH", 5)
    folder = RunFolder.open(tmp_path / "whole")
    files = snapshot(folder)
    with pytest.raises(CheckpointError) as error:
        launcher.resume(str(folder.path), {"iterations": "12"}, quiet=True)
    assert str(error.value).startswith(
        "the checkpoint does not fit model 'edited_model:net': size mismatch for "
    )
    assert snapshot(folder) == files


def test_older_checkpoint_without_settings_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted(tmp_path)
    folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    store = checkpoint.CheckpointStore(folder.checkpoints, 1, "sync")
    newest = store.newest()
    assert newest is not None
    del newest.state["settings"]
    store.save(newest.iteration, newest.state)
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert resumed["warnings"] == []
    assert resumed["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("done", ["in the middle", "at the end"])
def test_damaged_result_next_to_valid_checkpoints_is_archived(
    done: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = uninterrupted(tmp_path, checkpoint_every=8)
    folder = RunFolder.open(tmp_path / "whole")
    if done == "in the middle":
        folder = cut_after(tmp_path, 5, monkeypatch, checkpoint_every=2)
    folder.result_file.write_text('{"schema": 1, "sta')
    resumed = result_of(launcher.resume(str(folder.path), {}, quiet=True))
    assert (resumed["status"], resumed["iterations"]) == ("finished", 8)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert (folder.path / "result-1.json").read_text() == '{"schema": 1, "sta'
