"""Snapshots isolate a state from training, and copy it from a device beside training."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.training.checkpoint import CheckpointStore, state_file, write_checkpoint
from paceline.training.snapshot import Snapshot, SnapshotBuffers, cloned, without_copy
from tests.support.checkpoint_stores import newest


class FakeSideStream:
    """Treats the CPU as a device, and logs what a GPU's streams would be asked for."""

    def __init__(self, room_bytes: float = float("inf")) -> None:
        self.room_bytes = room_bytes
        self.log: list[str] = []
        self.threads: list[str] = []

    def has_room(self, size_bytes: int) -> bool:
        self.log.append(f"room for {size_bytes}")
        return size_bytes <= self.room_bytes

    def mark(self) -> None:
        self.log.append("mark")

    @contextmanager
    def after_mark(self) -> Iterator[None]:
        self.log.append("copy")
        self.threads.append(threading.current_thread().name)
        yield
        self.log.append("copied")


def buffers_beside(stream: FakeSideStream) -> SnapshotBuffers:
    return SnapshotBuffers(lambda _: stream)


def training_state() -> dict[str, Any]:
    weight = torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return {
        "model": {"weight": weight, "tied": weight, "part": torch.arange(100.0)[10:20]},
        "optimizer": {"state": {0: {"momentum": torch.ones(24)}}, "lr": 0.1},
        "step": 3,
    }


def file_of(folder: Path, snapshot: Snapshot) -> bytes:
    folder.mkdir()
    write_checkpoint(folder, 1, snapshot.in_host_memory())
    return state_file(folder, 1).read_bytes()


def test_copies_beside_training_and_direct_copies_give_the_same_file(tmp_path: Path) -> None:
    state = training_state()
    beside = buffers_beside(FakeSideStream()).take(state)
    direct = SnapshotBuffers().take(state)
    assert file_of(tmp_path / "beside", beside) == file_of(tmp_path / "direct", direct)


def test_state_may_change_before_its_clones_are_copied_to_host_memory() -> None:
    state = training_state()
    momentum: Tensor = state["optimizer"]["state"][0]["momentum"]
    snapshot = buffers_beside(FakeSideStream()).take(state)
    momentum.fill_(9)
    copied = snapshot.in_host_memory()["optimizer"]["state"][0]["momentum"]
    assert torch.equal(copied, torch.ones(24))


def test_taking_a_snapshot_only_clones_and_marks_the_training_stream() -> None:
    stream = FakeSideStream()
    snapshot = buffers_beside(stream).take(training_state())
    state_bytes = (24 + 10 + 24) * 4
    assert stream.log == [f"room for {state_bytes}", "mark"]
    snapshot.in_host_memory()
    assert stream.log[2:] == ["copy", "copied"]


def test_clones_are_released_when_they_are_in_host_memory() -> None:
    clones: list[weakref.ref[Tensor]] = []
    buffers = buffers_beside(FakeSideStream())
    snapshot = buffers.take({"weights": torch.ones(10)})
    clones.append(weakref.ref(snapshot._state["weights"]))
    snapshot.in_host_memory()
    gc.collect()
    assert clones[0]() is None
    assert (buffers.clone_bytes, buffers.host_bytes) == (40, 40)


def test_snapshot_is_copied_from_the_device_once() -> None:
    stream = FakeSideStream()
    snapshot = buffers_beside(stream).take(training_state())
    assert snapshot.in_host_memory() is snapshot.in_host_memory()
    assert stream.log.count("copy") == 1


def test_without_room_for_clones_training_waits_for_the_copy() -> None:
    stream = FakeSideStream(room_bytes=39)
    buffers = buffers_beside(stream)
    weights = torch.ones(10)
    snapshot = buffers.take({"weights": weights})
    weights.fill_(9)
    assert torch.equal(snapshot.in_host_memory()["weights"], torch.ones(10))
    assert stream.log == ["room for 40"]
    assert buffers.clone_bytes == 0


def test_training_waits_for_the_copy_if_the_clones_do_not_fit_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("paceline.training.snapshot.cloned", fail)
    stream = FakeSideStream()
    snapshot = buffers_beside(stream).take({"weights": torch.ones(10)})
    assert torch.equal(snapshot.in_host_memory()["weights"], torch.ones(10))
    assert "mark" not in stream.log


def test_writer_thread_copies_from_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeSideStream()
    monkeypatch.setattr(
        "paceline.training.checkpoint.SnapshotBuffers", partial(buffers_beside, stream)
    )
    store = CheckpointStore(tmp_path, 1, "background")
    store.save(1, {"weights": torch.ones(10)})
    loaded = newest(store).state["weights"]
    assert torch.equal(loaded, torch.ones(10))
    assert stream.threads == ["checkpoint writer"]
    assert (store.extra_memory_bytes, store.extra_gpu_memory_bytes) == (40, 40)


def test_cloned_state_shares_memory_only_between_tied_tensors() -> None:
    state = training_state()["model"]
    clones = cloned(state)
    assert clones["weight"].data_ptr() == clones["tied"].data_ptr() != state["weight"].data_ptr()
    assert clones["weight"].stride() == state["weight"].stride()


@pytest.mark.gpu
def test_gpu_snapshot_has_the_weights_between_two_updates(tmp_path: Path) -> None:
    """While the stream is busy, so that both updates are still to come when the copy is taken."""
    weights = torch.zeros(1 << 22, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    weights += 1
    buffers = SnapshotBuffers()
    snapshot = buffers.take({"weights": weights})
    weights += 1
    copied = snapshot.in_host_memory()["weights"]
    assert copied.is_pinned()
    assert torch.equal(copied, torch.ones(1 << 22))
    assert buffers.clone_bytes == weights.nbytes
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    write_checkpoint(tmp_path / "gpu", 1, {"weights": copied})
    write_checkpoint(tmp_path / "cpu", 1, without_copy({"weights": weights - 1}))
    files = [state_file(tmp_path / name, 1).read_bytes() for name in ("gpu", "cpu")]
    assert files[0] == files[1]
