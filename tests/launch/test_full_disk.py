"""Runs whose disk is full or whose folder is removed: one line that names the file and the disk."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunError
from paceline.launch import node_workers
from tests.support.commands import (
    ENDLESS,
    SLOW,
    TINY,
    Command,
    flags,
    is_training,
    launch,
    names_in,
    train,
    wait_until,
)

DISK_BYTES = 36 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Room for the first records of two workers, and not for their reports."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "paceline-test", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_is_named_with_the_file_that_failed_first(small_disk: Path) -> None:
    settings: dict[str, Any] = {"iterations": 100_000, "checkpoint_every": "never"}
    with train(small_disk, nproc_per_node=2, quiet=True, **settings) as command:
        ended = command.end()
    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    first, _, rest = ended.err.removeprefix("paceline: error: ").strip().partition("; ")
    where = f"No space left on device (disk mounted at {small_disk})"
    files = [f"{small_disk}/run/events-{rank}.jsonl" for rank in (0, 1)]
    assert first in [f"cannot write {file}: {where}" for file in files]
    # What was removed at the end may have left room for the result.
    assert rest in ("", f"cannot write {small_disk}/run/result.json: {where}")


def test_workers_that_cannot_be_started_for_want_of_space_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(node_workers, "write_json", write)
    with pytest.raises(RunError, match=r"run/launch-0\.json: No space left") as raised:
        launch(tmp_path, nproc_per_node=2)
    assert "\n" not in str(raised.value)
    assert not names_in(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_folder_that_is_removed_ends_the_run_with_one_line(
    workers: int, tmp_path: Path
) -> None:
    # The next checkpoint cannot be written, and nothing of the failure either.
    settings: dict[str, Any] = {**ENDLESS, "iterations": 60, "checkpoint_every": 20}
    with train(tmp_path, SLOW, nproc_per_node=workers, **settings) as command:
        folder = tmp_path / "run"
        wait_until(lambda: is_training(folder, range(workers)), "all workers train")
        wait_until(lambda: _is_removed(folder), "the folder is gone")
        ended = command.end()
    assert ended.code == 1
    assert ended.err.count("\n") == 1, ended.err
    assert f"{folder}" in ended.err
    assert "Traceback" not in ended.out


def _is_removed(folder: Path) -> bool:
    """The sampler or a worker may add a file while the folder is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def test_a_run_folder_removed_under_torchrun_is_reported_in_one_line(tmp_path: Path) -> None:
    settings = {**TINY, **ENDLESS, "iterations": 60, "out": tmp_path, "name": "run", "quiet": True}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Command([*torchrun, "-m", "paceline", "train", *flags(settings)], SLOW) as command:
        folder = tmp_path / "run"
        wait_until(lambda: is_training(folder), "both workers train")
        wait_until(lambda: _is_removed(folder), "the folder is gone")
        ended = command.end()
    assert ended.code == 1
    assert f"paceline: error: cannot write {folder}/result.json" in ended.err
    assert "FileNotFoundError" not in ended.err
