"""The checkpoint store: what is saved comes back bit for bit, and damage is never loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import CheckpointError, RunError
from paceline.worker import checkpoint_file
from paceline.worker.checkpoint import Checkpoint, CheckpointStore, newest_checkpoint

TENSORS = {
    "float32": torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),
    "bfloat16": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "float16": torch.tensor([0.1, 65504.0], dtype=torch.float16),
    "float64": torch.tensor([float("nan"), 1e-310], dtype=torch.float64),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": torch.arange(256, dtype=torch.int32).to(torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "no dimension": torch.tensor(7.25),
    "no elements": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "slice": torch.arange(100.0)[10:90:7],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
    "channels_last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.tensor([1.0, 2.0])),
    "random state": torch.Generator().manual_seed(5).get_state(),
}


@pytest.fixture(params=["sync", "background"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bits(tensor: Tensor) -> bytes:
    """The elements' bytes in their logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def state_of(iteration: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(iteration)), "iteration": iteration}


def filled_store(folder: Path, *, last: int, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder, keep, "sync")
    for iteration in range(1, last + 1):
        store.save(iteration, state_of(iteration))
    return store


def newest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.newest()
    assert checkpoint is not None
    return checkpoint


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(tmp_path: Path, mode: str, name: str) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"tensor": TENSORS[name]})
    loaded = newest(store).state["tensor"]
    original = TENSORS[name]
    assert (loaded.dtype, loaded.shape) == (original.dtype, original.shape)
    assert bits(loaded) == bits(original)


def test_channels_last_stays_channels_last(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"image": TENSORS["channels_last"]})
    loaded = newest(store).state["image"]
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert not loaded.is_contiguous()


def test_nested_values_come_back_with_their_types(tmp_path: Path, mode: str) -> None:
    values = {
        "numbers": [1, -2.5, True, None, float("inf")],
        "nested": {"text": "läuft", 3: {"betas": (0.9, 0.999)}, "none": []},
    }
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, values)
    loaded = newest(store).state
    assert loaded == values
    assert [type(value) for value in loaded["numbers"]] == [int, float, bool, type(None), float]


def test_a_training_resumes_bit_for_bit(tmp_path: Path, mode: str) -> None:
    def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> bytes:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        return b"".join(bits(value) for value in model.state_dict().values())

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        return model, torch.optim.Adam(model.parameters())

    torch.manual_seed(3)
    model, optimizer = fresh()
    trained(model, optimizer, steps=3)
    store = CheckpointStore(tmp_path, 1, mode)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    store.save(3, {**saved, "random": torch.get_rng_state()})
    expected = trained(model, optimizer, steps=3)

    state = newest(store).state
    resumed, resumed_optimizer = fresh()
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    assert trained(resumed, resumed_optimizer, steps=3) == expected


def test_only_the_slice_is_written_and_not_the_storage_behind_it(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"slice": torch.zeros(1_000_000)[:10]})
    store.close()
    assert store.bytes < 100_000


def test_tied_weights_are_written_once(tmp_path: Path, mode: str) -> None:
    shared = torch.zeros(250_000)
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"a": shared, "b": shared.detach()})
    store.close()
    assert store.bytes < 1_500_000


@pytest.mark.parametrize(
    "value",
    [np.float64(1.0), np.arange(3), {1, 2}, object(), print, torch.zeros(2).to_sparse()],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_safely_is_not_saved(
    tmp_path: Path, mode: str, value: object
) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    with pytest.raises(TypeError, match=r"state\['outer'\]\[0\] is a "):
        store.save(1, {"outer": [value]})
    store.close()
    assert names(tmp_path) == []


def test_an_empty_folder_has_no_newest(tmp_path: Path, mode: str) -> None:
    assert CheckpointStore(tmp_path / "new", 1, mode).newest() is None


def test_the_last_ones_are_kept(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 2, mode)
    for iteration in (5, 10, 15, 20):
        store.save(iteration, state_of(iteration))
    store.close()
    assert names(tmp_path) == [
        "iteration-00000015.json",
        "iteration-00000015.pt",
        "iteration-00000020.json",
        "iteration-00000020.pt",
    ]


def test_nothing_is_removed_before_the_new_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled_store(tmp_path, last=1, keep=1)
    found: list[Checkpoint | None] = []
    remove = checkpoint_file.remove_checkpoint

    def look_then_remove(folder: Path, iteration: int) -> None:
        found.append(newest_checkpoint(folder))
        remove(folder, iteration)

    monkeypatch.setattr("paceline.worker.checkpoint.remove_checkpoint", look_then_remove)
    store.save(2, state_of(2))
    assert [checkpoint.iteration for checkpoint in found if checkpoint] == [2]


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "iteration-00000003.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "iteration-00000003.pt").write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(folder / "iteration-00000003.pt", 100)


def empty(folder: Path) -> None:
    os.truncate(folder / "iteration-00000003.pt", 0)


def lose_the_checksum(folder: Path) -> None:
    (folder / "iteration-00000003.json").unlink()


def garble_the_checksum(folder: Path) -> None:
    (folder / "iteration-00000003.json").write_text('{"schema": 1, "iter')


def take_anothers_place(folder: Path) -> None:
    for suffix in ("pt", "json"):
        (folder / f"iteration-00000001.{suffix}").replace(folder / f"iteration-00000003.{suffix}")


DAMAGES = [
    flip_a_byte,
    truncate,
    empty,
    lose_the_checksum,
    garble_the_checksum,
    take_anothers_place,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_passed_over_with_a_warning(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = filled_store(tmp_path, last=3)
    damage(tmp_path)
    checkpoint = newest(store)
    assert checkpoint.iteration == checkpoint.state["iteration"] == 2
    (warning,) = checkpoint.warnings
    assert "iteration-00000003" in warning
    assert "\n" not in warning


def test_if_all_are_damaged_the_user_is_told_and_nothing_begins_anew(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=2)
    for path in tmp_path.glob("*.pt"):
        os.truncate(path, 50)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as raised:
        store.newest()
    assert "\n" not in str(raised.value)


def test_damaged_ones_do_not_crowd_out_whole_ones(tmp_path: Path) -> None:
    filled_store(tmp_path, last=3, keep=3)
    flip_a_byte(tmp_path)
    store = CheckpointStore(tmp_path, 2, "sync")
    assert newest(store).iteration == 2
    store.save(4, state_of(4))
    assert checkpoint_file.iterations(tmp_path) == [4, 2]


def test_the_one_just_saved_stays_even_if_a_damaged_later_one_exists(tmp_path: Path) -> None:
    filled_store(tmp_path, last=3, keep=3)
    flip_a_byte(tmp_path)
    (tmp_path / "iteration-00000002.pt").unlink()
    store = CheckpointStore(tmp_path, 1, "sync")
    assert newest(store).iteration == 1
    store.save(2, state_of(2))
    assert checkpoint_file.iterations(tmp_path) == [2]


def test_a_new_store_continues_an_existing_folder(tmp_path: Path, mode: str) -> None:
    filled_store(tmp_path, last=2)
    store = CheckpointStore(tmp_path, 3, mode)
    assert newest(store).iteration == 2
    store.save(3, state_of(3))
    store.close()
    assert checkpoint_file.iterations(tmp_path) == [3, 2, 1]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 2, mode)
    store.save(7, {"value": "old"})
    store.save(7, {"value": "new, and longer than before"})
    assert newest(store).state == {"value": "new, and longer than before"}
    assert names(tmp_path) == ["iteration-00000007.json", "iteration-00000007.pt"]


class Crash(BaseException):
    """Ends the writing at a chosen point, like the power."""


@pytest.mark.parametrize("point", range(6))
def test_at_every_step_of_replacing_there_is_a_whole_one(
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


def test_contents_and_names_reach_the_disk_in_an_order_that_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append("sync folder" if path == tmp_path else f"sync {path.suffixes[0]}")
        fsync(descriptor)

    def noting_replace(path: Path, target: Path) -> Path:
        steps.append(f"name {target.suffix}")
        return replace(path, target)

    store = CheckpointStore(tmp_path, 1, "sync")
    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    store.save(1, state_of(1))
    assert steps == [
        "sync .pt", "sync .json", "name .json", "sync folder", "name .pt", "sync folder",
    ]  # fmt: skip


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.sentinel),)


@pytest.mark.parametrize("form", ["archive", "bare pickle"])
def test_a_forged_checkpoint_with_a_matching_checksum_is_not_executed(
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
    assert "is refused" in checkpoint.warnings[0]
    assert not sentinel.exists()


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_temporary_files_of_dead_processes_are_removed_at_the_start(
    tmp_path: Path, dead_pid: int
) -> None:
    (tmp_path / f".iteration-00000009.pt.{dead_pid}").write_bytes(b"half")
    (tmp_path / f".iteration-00000009.json.{dead_pid}").write_bytes(b"half")
    CheckpointStore(tmp_path, 1, "sync")
    assert names(tmp_path) == []


def test_a_temporary_file_older_than_the_process_of_its_number_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / f".iteration-00000009.pt.{os.getpid()}"
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    CheckpointStore(tmp_path, 1, "sync")
    assert names(tmp_path) == []


def test_a_temporary_file_of_a_living_process_and_other_files_are_left_alone(
    tmp_path: Path,
) -> None:
    left = [f".iteration-00000009.pt.{os.getpid()}", "iteration-notes.txt"]
    for name in left:
        (tmp_path / name).write_bytes(b"")
    store = CheckpointStore(tmp_path, 1, "sync")
    store.save(1, state_of(1))
    assert set(left) <= set(names(tmp_path))


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunError, match=r"cannot write checkpoints to .*file/checkpoints: "
    ) as raised:
        CheckpointStore(tmp_path / "file" / "checkpoints", 1, "sync")
    assert "\n" not in str(raised.value)


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background writes begin only when this event is set."""
    go = threading.Event()
    write = checkpoint_file.write_checkpoint

    def write_later(folder: Path, iteration: int, state: dict[str, Any]) -> int:
        go.wait(timeout=60)
        return write(folder, iteration, state)

    monkeypatch.setattr("paceline.worker.checkpoint.write_checkpoint", write_later)
    yield go
    go.set()


def test_later_changes_of_the_weights_do_not_reach_a_background_write(
    tmp_path: Path, held_writer: threading.Event
) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    weights = {"a": torch.zeros(100), "b": torch.zeros(2, 2, 2, 2)}
    store.save(1, {"model": weights})
    for weight in weights.values():
        weight.fill_(9)
    held_writer.set()
    loaded = newest(store).state["model"]
    assert all(torch.equal(value, torch.zeros_like(value)) for value in loaded.values())


def test_a_background_save_returns_before_the_file_is_written(
    tmp_path: Path, held_writer: threading.Event
) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    store.save(1, state_of(1))
    before = names(tmp_path)
    held_writer.set()
    store.close()
    assert before == []
    assert names(tmp_path) == ["iteration-00000001.json", "iteration-00000001.pt"]


def test_background_copies_reuse_their_memory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    for iteration in range(3):
        store.save(iteration, {"weights": torch.full((1000,), float(iteration)), "n": iteration})
    store.close()
    assert store.extra_memory_bytes == 1000 * 4


def test_a_background_copy_follows_a_state_that_grows_and_changes_shape(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    store.save(1, {"a": torch.zeros(10)})
    store.save(2, {"a": torch.ones(20), "b": torch.ones(5)})
    loaded = newest(store).state
    assert torch.equal(loaded["a"], torch.ones(20))
    assert torch.equal(loaded["b"], torch.ones(5))
    assert store.extra_memory_bytes == 25 * 4


@pytest.mark.parametrize("call", ["save", "newest", "close"])
def test_a_failed_background_write_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, 1, "background")
    folder.rmdir()
    store.save(1, state_of(1))
    with pytest.raises(RunError, match="cannot write checkpoint"):
        store.save(2, state_of(2)) if call == "save" else getattr(store, call)()
    store.close()


def test_what_was_written_is_counted(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 5, mode)
    for iteration in range(3):
        store.save(iteration, state_of(iteration))
    store.close()
    assert store.count == 3
    assert store.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.pt"))


def test_sync_mode_takes_no_extra_memory_and_no_background_time(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=1)
    assert (store.extra_memory_bytes, store.background_seconds) == (0, 0.0)
