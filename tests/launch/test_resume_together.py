"""Two workers that are stopped or killed, and resumed, end where undisturbed ones end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.commands import SLOW, is_training, launch, train, wait_until, workers_of
from paceline.launch import start
from paceline.records import Result, RunFolder
from paceline.worker.checkpoint import iterations

SETTINGS = {"model": "own_code:Slow", "iterations": 160, "nproc_per_node": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)
        return launch(tmp_path_factory.mktemp("undisturbed"), **SETTINGS).result or {}


def check_resumed_equals(undisturbed: Result, folder: Path) -> None:
    result = start.resume(str(folder), {}, quiet=True).result
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
    assert ended.err == f"paceline: error: stopped by SIGINT after iteration {done}\n"
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
    check_resumed_equals(undisturbed, tmp_path / "run")
