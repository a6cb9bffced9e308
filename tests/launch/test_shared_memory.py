"""Runs whose workers share memory: by `--strategy shared`, and by `--communicator hierarchical`.

That no process and no shared memory is left is checked after every test (tests/support/leaks.py).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.launch import launcher
from paceline.records import Result, read_json
from paceline.training.checkpoint import iterations, newest_checkpoint
from tests.support.commands import (
    ENDLESS,
    HERE,
    LIMIT_SECONDS,
    TINY,
    Ended,
    flags,
    launch,
    names_in,
    run_nodes,
    sabotage,
    train,
    wait_until,
    warm_commands,
    workers_of,
)
from tests.support.warm import PrewarmedStarter


def finished(result: Result | None) -> Result:
    assert result is not None
    assert result["status"] == "finished", result["cause"]
    assert result["iterations"] == TINY["iterations"]
    return result


def weights_of(run: Path) -> Tensor:
    """At the newest checkpoint, one after the other."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    return torch.cat([weight.flatten() for weight in checkpoint.state["model"].values()])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "sharded"])
def test_two_workers_end_with_the_same_bits_as_over_torch(
    strategy: str, tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    """Whatever the strategy: two numbers have one sum."""
    settings = {"strategy": strategy, "communicator": "hierarchical", "nproc_per_node": 2}
    result = finished(launch(tmp_path, **settings).result)
    assert result["config"]["communicator"] == "hierarchical"
    expected = read_json(talkative_run[0] / "result.json")
    assert expected["config"]["communicator"] == "torch"
    assert result["weights_sha256"] == expected["weights_sha256"]


@pytest.mark.parametrize(
    ("strategy", "communicator"), [("shared", "torch"), ("overlap", "hierarchical")]
)
def test_two_nodes_of_two_workers_train_as_one_worker_does(
    strategy: str, communicator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_NOTES", str(tmp_path))
    settings: dict[str, Any] = {
        "strategy": strategy,
        "communicator": communicator,
        "model": "user_code:Fingerprinted",
        "nproc_per_node": 2,
        "checkpoint_every": 12,
    }
    ended = run_nodes([tmp_path] * 2, **settings)
    assert [(each.code, each.err) for each in ended] == [(0, "")] * 2
    result = finished(read_json(tmp_path / "run" / "result.json"))
    assert [worker["node"] for worker in result["workers"]] == [0, 0, 1, 1]
    notes = [(tmp_path / f"weights-{rank}").read_text().split() for rank in range(4)]
    assert len(notes[0]) == TINY["iterations"]
    assert notes == notes[:1] * 4, "weights differ between workers"
    launch(tmp_path, strategy="single", name="alone", checkpoint_every=12)
    assert distance(weights_of(tmp_path / "run"), weights_of(tmp_path / "alone")) < 1e-5


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory, starter: PrewarmedStarter) -> Path:
    """With `shared`, all of whose processes were killed some time after the fourth iteration."""
    out = tmp_path_factory.mktemp("killed")
    settings = {"model": "user_code:Slow", "strategy": "shared", "nproc_per_node": 2}
    slow = {"OWN_SLEEP_SECONDS": "0.4"}
    with (
        warm_commands(starter),
        train(out, slow, checkpoint_every=2, **settings) as command,
    ):
        wait_until(lambda: len(iterations(out / "run" / "checkpoints")) > 1, "it has checkpoints")
        for worker in workers_of(command.process.pid).values():
            worker.kill()
        command.process.kill()
    assert iterations(out / "run" / "checkpoints")[-1] < TINY["iterations"]
    return out / "run"


def resume_under(strategy: str, run: Path, copy: Path, workers: int) -> Result:
    """A copy of a run, from its newest checkpoint to the end."""
    shutil.copytree(run, copy)
    (copy / "result.json").unlink(missing_ok=True)
    recorded = read_json(copy / "config.json")
    recorded["config"]["strategy"] = strategy
    (copy / "config.json").write_text(json.dumps(recorded))
    changes = {"nproc_per_node": workers, "checkpoint_every": 12}
    return finished(launcher.resume(str(copy), changes, quiet=True).result)


@pytest.mark.parametrize("strategy", ["shared", "overlap"])
def test_a_killed_and_resumed_run_has_the_weights_of_an_uninterrupted_one(
    strategy: str, killed_run: Path, tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    """Under the strategy that it began with, and under another."""
    result = resume_under(strategy, killed_run, tmp_path / "run", workers=2)
    expected = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == expected["weights_sha256"]


def test_one_worker_can_resume_a_run_of_shared_workers(
    killed_run: Path, tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    resume_under("single", killed_run, tmp_path / "run", workers=1)
    assert distance(weights_of(tmp_path / "run"), weights_of(talkative_run[0])) < 1e-6


def test_shared_workers_can_resume_a_run_of_others(
    tmp_path: Path, talkative_run: tuple[Path, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_NOTES", str(tmp_path))
    half = tmp_path / "half"
    shutil.copytree(talkative_run[0], half)
    for file in (half / "checkpoints").glob("*12.*"):
        file.unlink()
    assert iterations(half / "checkpoints") == [6]
    result = resume_under("shared", half, tmp_path / "run", workers=2)
    expected = read_json(talkative_run[0] / "result.json")
    assert result["weights_sha256"] == expected["weights_sha256"]


def test_a_killed_worker_is_the_reported_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.01")
    with sabotage(tmp_path / "run", 1, signal.SIGKILL, while_training=True):
        outcome = launch(tmp_path, **{**ENDLESS, "strategy": "shared", "nproc_per_node": 2})
    assert outcome.result is not None
    assert outcome.result["cause"] == "rank 1 was killed by SIGKILL"


@pytest.mark.root
def test_too_little_shared_memory_is_rejected_in_one_line(tmp_path: Path) -> None:
    """In a mount namespace, so that other processes do not see the small one."""
    words = flags({**TINY, "strategy": "shared", "out": tmp_path, "nproc_per_node": 2})
    command = [sys.executable, "-m", "paceline", "train"]
    script = 'mount -t tmpfs -o size=1m small /dev/shm && "$@"; code=$?; ls -A /dev/shm; exit $code'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *command, *words],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("paceline: error: ")
    assert "MiB of shared memory, but /dev/shm has 1 MiB free" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not names_in(tmp_path)
