"""Small checkpoint stores and their contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.training.checkpoint import Checkpoint, CheckpointStore


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
