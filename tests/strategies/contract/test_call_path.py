"""The path from the training loop to the process group stays short."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import from_mapping
from paceline.records import RunFolder
from tests.strategies.contract import real_runs
from tests.support.worker_pool import WorkerPool

MAX_FRAMES = 5


class RecordingGroup:
    """Forwards to a process group and records the call path of each all-reduce of a step."""

    def __init__(self, group: Any, paths: list[list[str]]) -> None:
        self._group = group
        self._paths = paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, *arguments: Any) -> Any:
        path = []
        frame = sys._getframe(1)
        while frame.f_code.co_qualname != "TrainingLoop.run" and frame.f_back is not None:
            path.append(frame.f_code.co_qualname)
            frame = frame.f_back
        path.append(frame.f_code.co_qualname)
        if "TrainStep.__call__" in path:
            self._paths.append(path[::-1])
        return self._group.allreduce(*arguments)


def record_paths(communicator: Communicator, values: dict[str, Any]) -> list[list[str]]:
    assert isinstance(communicator, TorchCommunicator)
    paths: list[list[str]] = []
    group = communicator._gloo
    communicator._gloo = RecordingGroup(group, paths)
    try:
        real_runs.work(communicator, values, 0)
    finally:
        communicator._gloo = group
    return paths


def test_loop_reaches_the_process_group_in_five_frames(pool: WorkerPool, tmp_path: Path) -> None:
    values = {
        "strategy": "allreduce",
        "options": {"flat": "true"},
        "model": "mlp",
        "iterations": 3,
        "batch_size": 8,
        "train_samples": 64,
        "test_samples": 8,
        "threads": 1,
        "sample_seconds": 0,
        "tensorboard": False,
        "eval_every": "never",
        "nproc_per_node": 2,
        "out": str(tmp_path),
        "name": "frames",
    }
    RunFolder.create(from_mapping(values))
    paths = pool.run(2, record_paths, values, fresh=True)[0]
    assert len(paths) == 3, "one all-reduce per step"
    for path in paths:
        assert path[0] == "TrainingLoop.run", " -> ".join(path)
        assert len(path) <= MAX_FRAMES, " -> ".join(path)
