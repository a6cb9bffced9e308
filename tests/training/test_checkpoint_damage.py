"""The checkpoint store never loads damaged, forged or incomplete checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import CheckpointError, DamagedCheckpointError, RunError
from paceline.training import checkpoint as checkpoint_file
from paceline.training.checkpoint import CheckpointStore, newest_checkpoint
from tests.support.checkpoint_stores import filled_store, names, newest, state_of


def flip_byte(folder: Path) -> None:
    content = bytearray((folder / "iteration-00000003.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "iteration-00000003.pt").write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(folder / "iteration-00000003.pt", 100)


def empty(folder: Path) -> None:
    os.truncate(folder / "iteration-00000003.pt", 0)


def remove_checksum(folder: Path) -> None:
    (folder / "iteration-00000003.json").unlink()


def truncate_checksum(folder: Path) -> None:
    (folder / "iteration-00000003.json").write_text('{"schema": 1, "iter')


def replace_by_another_iteration(folder: Path) -> None:
    for suffix in ("pt", "json"):
        (folder / f"iteration-00000001.{suffix}").replace(folder / f"iteration-00000003.{suffix}")


DAMAGES = [
    flip_byte,
    truncate,
    empty,
    remove_checksum,
    truncate_checksum,
    replace_by_another_iteration,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = filled_store(tmp_path, last=3)
    damage(tmp_path)
    checkpoint = newest(store)
    assert checkpoint.iteration == checkpoint.state["iteration"] == 2
    (warning,) = checkpoint.warnings
    assert "iteration-00000003" in warning
    assert "\n" not in warning


def test_error_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=2)
    for path in tmp_path.glob("*.pt"):
        os.truncate(path, 50)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as raised:
        store.newest()
    assert "\n" not in str(raised.value)


def test_newer_schema_is_not_reported_as_damage(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=2)
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(CheckpointError, match="schema 99, newer than this paceline's") as raised:
        store.newest()
    assert not isinstance(raised.value, DamagedCheckpointError)


def test_missing_checksum_file_is_reported_as_damage(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=1)
    (tmp_path / "iteration-00000001.json").unlink()
    with pytest.raises(DamagedCheckpointError):
        store.newest()


def test_damaged_checkpoints_do_not_displace_valid_ones(tmp_path: Path) -> None:
    filled_store(tmp_path, last=3, keep=3)
    flip_byte(tmp_path)
    store = CheckpointStore(tmp_path, 2, "sync")
    assert newest(store).iteration == 2
    store.save(4, state_of(4))
    assert checkpoint_file.iterations(tmp_path) == [4, 2]


def test_saved_checkpoint_is_kept_next_to_a_damaged_later_one(tmp_path: Path) -> None:
    filled_store(tmp_path, last=3, keep=3)
    flip_byte(tmp_path)
    (tmp_path / "iteration-00000002.pt").unlink()
    store = CheckpointStore(tmp_path, 1, "sync")
    assert newest(store).iteration == 1
    store.save(2, state_of(2))
    assert checkpoint_file.iterations(tmp_path) == [2]


class Crash(BaseException):
    """Simulates a power failure at a chosen point of a write."""


@pytest.mark.parametrize("point", range(6))
def test_valid_checkpoint_exists_at_every_step_of_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    store = CheckpointStore(tmp_path, 1, "sync")
    store.save(7, {"value": "old"})
    steps = 0

    def crash_at(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > point:
                raise Crash
            return call(*arguments)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash_at(os.fsync))
        patch.setattr(Path, "replace", crash_at(Path.replace))
        with pytest.raises(Crash):
            store.save(7, {"value": "new"})
    assert newest(store).state["value"] in ("old", "new")


def test_files_are_synced_in_an_order_that_survives_a_power_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recording_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append("sync folder" if path == tmp_path else f"sync {path.suffixes[0]}")
        fsync(descriptor)

    def recording_replace(path: Path, target: Path) -> Path:
        steps.append(f"name {target.suffix}")
        return replace(path, target)

    store = CheckpointStore(tmp_path, 1, "sync")
    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "replace", recording_replace)
    store.save(1, state_of(1))
    assert steps == [
        "sync .pt", "sync .json", "name .json", "sync folder", "name .pt", "sync folder",
    ]  # fmt: skip


class Malicious:
    """Creates a folder when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.parametrize("form", ["archive", "bare pickle"])
def test_forged_checkpoint_with_a_matching_checksum_is_not_executed(
    tmp_path: Path, form: str
) -> None:
    sentinel = tmp_path / "executed"
    folder = tmp_path / "checkpoints"
    store = filled_store(folder, last=2)
    forged = folder / "iteration-00000002.pt"
    if form == "archive":
        torch.save({"model": Malicious(sentinel)}, forged)
    else:
        forged.write_bytes(pickle.dumps({"model": Malicious(sentinel)}))
    content = forged.read_bytes()
    checksum = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "iteration-00000002.json").write_text(
        json.dumps({"schema": 1, "iteration": 2, "contents": [checksum]})
    )
    checkpoint = newest(store)
    assert checkpoint.iteration == 1
    assert "is rejected" in checkpoint.warnings[0]
    assert not sentinel.exists()


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_temporary_files_of_exited_processes_are_removed(tmp_path: Path, dead_pid: int) -> None:
    (tmp_path / f".iteration-00000009.pt.{dead_pid}").write_bytes(b"half")
    (tmp_path / f".iteration-00000009.json.{dead_pid}").write_bytes(b"half")
    CheckpointStore(tmp_path, 1, "sync")
    assert names(tmp_path) == []


def test_temporary_file_older_than_the_process_with_its_pid_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / f".iteration-00000009.pt.{os.getpid()}"
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    CheckpointStore(tmp_path, 1, "sync")
    assert names(tmp_path) == []


def test_temporary_file_of_a_running_process_and_unrelated_files_are_kept(
    tmp_path: Path,
) -> None:
    left = [f".iteration-00000009.pt.{os.getpid()}", "iteration-notes.txt"]
    for name in left:
        (tmp_path / name).write_bytes(b"")
    store = CheckpointStore(tmp_path, 1, "sync")
    store.save(1, state_of(1))
    assert set(left) <= set(names(tmp_path))


def test_uncreatable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"cannot write checkpoints to .*file/checkpoints: "
    ) as raised:
        CheckpointStore(tmp_path / "file" / "checkpoints", 1, "sync")
    assert "\n" not in str(raised.value)


def write_forged(folder: Path, iteration: int, contents: bytes) -> None:
    """Write a state file with a matching checksum."""
    folder.mkdir(exist_ok=True)
    (folder / f"iteration-{iteration:08d}.pt").write_bytes(contents)
    content = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    record = {"schema": 1, "iteration": iteration, "contents": [content]}
    (folder / f"iteration-{iteration:08d}.json").write_text(json.dumps(record))


def compressed(contents: bytes) -> bytes:
    """Return the zip archive with compressed members."""
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(contents)) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return packed.getvalue()


def test_zip_bomb_with_a_forged_checksum_is_rejected_before_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    torch.save({"weights": torch.zeros(4_000_000)}, buffer)
    bomb = compressed(buffer.getvalue())
    assert len(bomb) < 100_000
    write_forged(tmp_path, 1, bomb)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(DamagedCheckpointError, match=r"16\d+ bytes, more than its size"):
        newest_checkpoint(tmp_path)


def test_state_file_that_is_not_a_zip_archive_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    torch.save({"weights": torch.zeros(4)}, buffer, _use_new_zipfile_serialization=False)
    write_forged(tmp_path, 1, buffer.getvalue())
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(DamagedCheckpointError, match="it is not a zip archive"):
        newest_checkpoint(tmp_path)
