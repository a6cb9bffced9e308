"""A run folder belongs to one run at a time, for as long as that run lives."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch import launcher as start
from paceline.launch.remote.folder_transfer import pack
from paceline.records import RunFolder, read_lines
from paceline.training.checkpoint import iterations
from tests.support.commands import ENDLESS, SLOW, free_port, launch, train, wait_until


def starts_of(folder: Path) -> list[int]:
    """The iterations at which a run was started or resumed."""
    events = read_lines(folder / "events-0.jsonl")
    return [event["iteration"] for event in events if event["event"] == "start"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_live_run_cannot_be_resumed_by_a_second_command(workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    strategy = "single" if workers == 1 else "allreduce"
    settings = {**ENDLESS, "checkpoint_every": 2, "nproc_per_node": workers, "strategy": strategy}
    with train(tmp_path, SLOW, **settings) as command:
        wait_until(lambda: len(iterations(folder / "checkpoints")) > 1, "there are checkpoints")
        owner = re.escape(f"process {command.process.pid} on {socket.gethostname()}")
        with pytest.raises(UsageError, match=f"run is in use by {owner}: wait until it ends"):
            start.resume(str(folder), {"iterations": "1"}, quiet=True)
        reached = iterations(folder / "checkpoints")[0]
        wait_until(lambda: iterations(folder / "checkpoints")[0] > reached, "it goes on")
        assert starts_of(folder) == [0]
        command.process.send_signal(signal.SIGINT)
        assert command.end().code == 130
    assert not (folder / ".lock").exists()
    done = iterations(folder / "checkpoints")[0]
    result = start.resume(str(folder), {"iterations": str(done + 1)}, quiet=True).result
    assert result is not None
    assert result["status"] == "finished"
    assert starts_of(folder) == [0, done]


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with train(tmp_path, SLOW, **ENDLESS, checkpoint_every=2, strategy="single") as command:
        wait_until(lambda: iterations(folder / "checkpoints"), "there is a checkpoint")
        command.process.kill()
    done = iterations(folder / "checkpoints")[0]
    result = start.resume(str(folder), {"iterations": str(done + 1)}, quiet=True).result
    assert result is not None
    assert result["status"] == "finished"


LAUNCHERS: dict[str, dict[str, str]] = {
    "one worker": {},
    "several workers": {"nproc_per_node": "2"},
    "elastic": {"elastic": "1:1", "checkpoint_every": "6"},
    "torchrun": {},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_respects_the_lock(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(tmp_path, checkpoint_every=6)
    folder = RunFolder.open(tmp_path / "run")
    before = folder.result_file.read_bytes()
    if launcher == "torchrun":
        variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {
            **variables,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
        }.items():
            monkeypatch.setenv(name, str(value))
    changes = {"iterations": "14", **LAUNCHERS[launcher]}
    with folder.locked(), pytest.raises(UsageError, match=f"process {os.getpid()} on "):
        start.resume(str(folder.path), changes, quiet=True)
    assert folder.result_file.read_bytes() == before
    assert starts_of(folder.path) == [0]
    assert start.resume(str(folder.path), changes, quiet=True).exit_code == 0


def test_records_from_another_machine_do_not_overwrite_a_live_run(tmp_path: Path) -> None:
    launch(tmp_path, strategy="single", checkpoint_every=6)
    folder = RunFolder.open(tmp_path / "run")
    packed = io.BytesIO()
    pack(folder.path, packed)
    request = {"folder": str(folder.path), "identity": None}
    given = json.dumps(request).encode() + b"\n" + packed.getvalue()
    command = [sys.executable, "-m", "paceline.launch.remote.folder_transfer", "take"]
    before = folder.identity()
    with folder.locked():
        ended = subprocess.run(command, input=given, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"is in use by process {os.getpid()}" in ended.stderr.decode()
    assert folder.identity() == before
