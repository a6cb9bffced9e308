"""The checkpoint store restores saved states bit-identically, in both write modes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.training import checkpoint as checkpoint_file
from paceline.training.checkpoint import Checkpoint, CheckpointStore, newest_checkpoint
from tests.support.checkpoint_stores import filled_store, names, newest, state_of

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
    """Return the bytes of the elements in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_is_restored_bit_identically(tmp_path: Path, mode: str, name: str) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"tensor": TENSORS[name]})
    loaded = newest(store).state["tensor"]
    original = TENSORS[name]
    assert (loaded.dtype, loaded.shape) == (original.dtype, original.shape)
    assert bits(loaded) == bits(original)


def test_channels_last_layout_is_preserved(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, {"image": TENSORS["channels_last"]})
    loaded = newest(store).state["image"]
    assert loaded.is_contiguous(memory_format=torch.channels_last)
    assert not loaded.is_contiguous()


def test_nested_values_keep_their_types(tmp_path: Path, mode: str) -> None:
    values = {
        "numbers": [1, -2.5, True, None, float("inf")],
        "nested": {"text": "läuft", 3: {"betas": (0.9, 0.999)}, "none": []},
    }
    store = CheckpointStore(tmp_path, 1, mode)
    store.save(1, values)
    loaded = newest(store).state
    assert loaded == values
    assert [type(value) for value in loaded["numbers"]] == [int, float, bool, type(None), float]


def test_resumed_training_is_bit_identical(tmp_path: Path, mode: str) -> None:
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


def test_slice_is_written_without_its_larger_storage(tmp_path: Path, mode: str) -> None:
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
def test_value_that_cannot_be_loaded_safely_is_rejected(
    tmp_path: Path, mode: str, value: object
) -> None:
    store = CheckpointStore(tmp_path, 1, mode)
    with pytest.raises(TypeError, match=r"state\['outer'\]\[0\] is a "):
        store.save(1, {"outer": [value]})
    store.close()
    assert names(tmp_path) == []


def test_empty_folder_has_no_newest_checkpoint(tmp_path: Path, mode: str) -> None:
    assert CheckpointStore(tmp_path / "new", 1, mode).newest() is None


def test_newest_checkpoints_are_kept(tmp_path: Path, mode: str) -> None:
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


def test_old_checkpoint_is_removed_only_after_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled_store(tmp_path, last=1, keep=1)
    found: list[Checkpoint | None] = []
    remove = checkpoint_file.remove_checkpoint

    def look_then_remove(folder: Path, iteration: int) -> None:
        found.append(newest_checkpoint(folder))
        remove(folder, iteration)

    monkeypatch.setattr("paceline.training.checkpoint.remove_checkpoint", look_then_remove)
    store.save(2, state_of(2))
    assert [checkpoint.iteration for checkpoint in found if checkpoint] == [2]


def test_new_store_continues_an_existing_folder(tmp_path: Path, mode: str) -> None:
    filled_store(tmp_path, last=2)
    store = CheckpointStore(tmp_path, 3, mode)
    assert newest(store).iteration == 2
    store.save(3, state_of(3))
    store.close()
    assert checkpoint_file.iterations(tmp_path) == [3, 2, 1]


def test_saving_an_iteration_again_replaces_its_checkpoint(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 2, mode)
    store.save(7, {"value": "old"})
    store.save(7, {"value": "new, and longer than before"})
    assert newest(store).state == {"value": "new, and longer than before"}
    assert names(tmp_path) == ["iteration-00000007.json", "iteration-00000007.pt"]


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Background writes wait for this event."""
    go = threading.Event()
    write = checkpoint_file.write_checkpoint

    def write_later(folder: Path, iteration: int, state: dict[str, Any]) -> int:
        go.wait(timeout=60)
        return write(folder, iteration, state)

    monkeypatch.setattr("paceline.training.checkpoint.write_checkpoint", write_later)
    yield go
    go.set()


def test_background_write_is_isolated_from_later_weight_changes(
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


def test_background_save_returns_before_the_file_is_written(
    tmp_path: Path, held_writer: threading.Event
) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    store.save(1, state_of(1))
    before = names(tmp_path)
    held_writer.set()
    store.close()
    assert before == []
    assert names(tmp_path) == ["iteration-00000001.json", "iteration-00000001.pt"]


def test_background_copies_reuse_memory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    for iteration in range(3):
        store.save(iteration, {"weights": torch.full((1000,), float(iteration)), "n": iteration})
    store.close()
    assert store.extra_memory_bytes == 1000 * 4


def test_background_copy_supports_a_state_that_changes_shape(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1, "background")
    store.save(1, {"a": torch.zeros(10)})
    store.save(2, {"a": torch.ones(20), "b": torch.ones(5)})
    loaded = newest(store).state
    assert torch.equal(loaded["a"], torch.ones(20))
    assert torch.equal(loaded["b"], torch.ones(5))
    assert store.extra_memory_bytes == 25 * 4


@pytest.mark.parametrize("call", ["save", "newest", "close"])
def test_next_call_raises_the_error_of_a_background_write(tmp_path: Path, call: str) -> None:
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder, 1, "background")
    folder.rmdir()
    store.save(1, state_of(1))
    with pytest.raises(RunError, match="cannot write checkpoint"):
        store.save(2, state_of(2)) if call == "save" else getattr(store, call)()
    store.close()


def test_written_checkpoints_and_bytes_are_counted(tmp_path: Path, mode: str) -> None:
    store = CheckpointStore(tmp_path, 5, mode)
    for iteration in range(3):
        store.save(iteration, state_of(iteration))
    store.close()
    assert store.count == 3
    assert store.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.pt"))


def test_sync_mode_uses_no_extra_memory_and_no_background_time(tmp_path: Path) -> None:
    store = filled_store(tmp_path, last=1)
    assert (store.extra_memory_bytes, store.background_seconds) == (0, 0.0)
