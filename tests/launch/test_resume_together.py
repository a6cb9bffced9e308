"""Workers that are stopped or killed, and resumed, end like uninterrupted ones.

Also where others than before go on.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.analysis.run import open_run
from paceline.analysis.world_sizes import WorldSize
from paceline.config import from_mapping
from paceline.errors import ConfigError
from paceline.launch import launcher
from paceline.records import Result, RunFolder, read_iteration_seconds
from paceline.training.checkpoint import iterations, newest_checkpoint
from tests.support.commands import (
    SLOW,
    TINY,
    Ended,
    is_training,
    launch,
    train,
    wait_until,
    warm_commands,
    workers_of,
)
from tests.support.warm import PrewarmedStarter

SETTINGS = {"model": "user_code:Slow", "iterations": 160, "nproc_per_node": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, starter: PrewarmedStarter) -> Result:
    with warm_commands(starter):
        return launch(tmp_path_factory.mktemp("undisturbed"), **SETTINGS).result or {}


def check_resumed_equals(undisturbed: Result, folder: Path, **changes: Any) -> None:
    result = launcher.resume(str(folder), changes, quiet=True).result
    assert result is not None
    assert result["status"] == "finished"
    assert len(result["workers"]) == 2
    assert result["samples"] == undisturbed["samples"]
    assert result["weights_sha256"] == undisturbed["weights_sha256"]


def test_ctrl_c_lets_the_workers_agree_and_leave_a_checkpoint(
    tmp_path: Path, undisturbed: Result
) -> None:
    with train(tmp_path, SLOW, checkpoint_every=100_000, **SETTINGS) as command:
        wait_until(lambda: is_training(tmp_path / "run"), "both workers train")
        command.process.send_signal(signal.SIGINT)
        ended = command.end()
    result = RunFolder.open(tmp_path / "run").read_result()
    assert result is not None
    done = result["iterations"]
    assert result["status"] == "stopped"
    assert ended.code == 130
    assert ended.err.splitlines() == [
        f"paceline: stopped by SIGINT after iteration {done}",
        f"paceline: resume with `paceline train --resume {tmp_path / 'run'}`",
    ]
    assert [worker["samples"] for worker in result["workers"]] == [6 * done] * 2
    assert iterations(tmp_path / "run" / "checkpoints") == [done]
    check_resumed_equals(undisturbed, tmp_path / "run")


def test_a_run_that_was_killed_altogether_can_be_resumed(
    tmp_path: Path, undisturbed: Result
) -> None:
    with train(tmp_path, SLOW, checkpoint_every=5, **SETTINGS) as command:
        checkpoints = tmp_path / "run" / "checkpoints"
        wait_until(lambda: len(iterations(checkpoints)) > 1, "there are checkpoints")
        for worker in workers_of(command.process.pid).values():
            worker.kill()
        command.process.kill()
    check_resumed_equals(undisturbed, tmp_path / "run", checkpoint_every=50)


def weights_after(folder: Path) -> Tensor:
    """At the newest checkpoint, one after the other."""
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return torch.cat([weight.flatten() for weight in checkpoint.state["model"].values()])


@pytest.mark.parametrize("workers", [3, 1])
def test_another_number_of_workers_resumes_with_the_same_samples(
    workers: int,
    talkative_run: tuple[Path, Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers did the first half of twelve batches of twelve samples; an epoch has eight."""
    monkeypatch.setenv("OWN_NOTES", str(tmp_path))
    whole, cut = talkative_run[0], tmp_path / "run"
    shutil.copytree(whole, cut)
    (cut / "result.json").unlink()
    for file in (cut / "checkpoints").glob("*12.*"):
        file.unlink()
    halfway, expected = weights_after(cut), weights_after(whole)
    result = launcher.resume(str(cut), {"nproc_per_node": workers}, quiet=True).result
    assert result is not None
    assert result["iterations"] == 12
    assert [worker["samples"] for worker in result["workers"]] == [6 * 12 // workers] * workers
    assert open_run(cut).worlds == [WorldSize(0, 2), WorldSize(6, workers)]
    since = read_iteration_seconds(cut / "events-0.jsonl", 12, since=6)
    assert result["workers"][0]["iteration_seconds"]["first"] == pytest.approx(since[0], abs=1e-6)
    assert distance(halfway, expected) > 1e-3, "the second half changes too little to tell"
    assert distance(weights_after(cut), expected) < 1e-5


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_workers_killed_before_their_first_checkpoint_are_started_again(tmp_path: Path) -> None:
    settings = {**TINY, "nproc_per_node": 2, "checkpoint_every": 6}
    whole = launch(tmp_path / "whole", **settings).result
    config = from_mapping({**settings, "out": str(tmp_path), "name": "run"})
    folder = RunFolder.create(config)
    result = launcher.resume(str(folder.path), {}, quiet=True).result
    assert whole is not None
    assert result is not None
    assert result["status"] == "finished"
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert iterations(folder.checkpoints) == [12, 6]


def records(folder: RunFolder) -> dict[Path, bytes]:
    """Without the samples of resources, which are taken while workers start, too."""
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if not path.name.startswith("resources-")}


def test_a_model_that_does_not_fit_the_checkpoint_is_rejected_without_changes(
    tmp_path: Path,
) -> None:
    launch(tmp_path, nproc_per_node=2, checkpoint_every=12, model="softmax")
    folder = RunFolder.open(tmp_path / "run")
    folder.change_config(dataclasses.replace(folder.read_config(), model="mlp"))
    before = records(folder)
    with pytest.raises(ConfigError) as refusal:
        launcher.resume(str(folder.path), {"iterations": "24"}, quiet=True)
    assert refusal.value.problems == (
        "--model is 'mlp' in config.json, but the checkpoint was written with 'softmax':"
        " restore it",
    )
    assert records(folder) == before
