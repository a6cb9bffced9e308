"""What recording collectives costs: `python benchmarks/collective_recorder.py`.

CPU time of one rank in a group of its own, where nothing is transferred, with and without the
recorder in turn. In a larger group, part of it passes while the transfer is in progress.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.measure.phase_clock import PhaseClock
from paceline.profiler.collectives.recorder import CollectiveRecorder

CALLS, ROUNDS = 200, 25


class MainThread:
    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.recorder_seconds = 0.0
        self._thread = threading.get_ident()

    def is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def expose(self, began: float, ended: float) -> None:
        self.clock.expose(self.clock.phase, began, ended)

    def note_exposed(self, phase: str, seconds: float) -> None:
        pass


def microseconds(function: Callable[[], object]) -> float:
    """CPU time of a call, of all threads."""
    began = process_time()
    for _ in range(CALLS):
        function()
    return (process_time() - began) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # not in the stubs
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    tensor, batch = torch.ones(16), torch.ones(4, 8)
    model = DistributedDataParallel(nn.Linear(8, 8))
    programs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "DDP: one bucket, forward and backward": lambda: model(batch).sum().backward(),
    }
    plain: dict[str, list[float]] = {name: [] for name in programs}
    recorded: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, program in programs.items():
                plain[name].append(microseconds(program))
                recorder = CollectiveRecorder(MainThread(), Path(folder))
                recorder.install()
                recorded[name].append(microseconds(program))
                recorder.remove()
    print(
        f"us of CPU time, median (minimum) of {ROUNDS} x {CALLS} calls, torch {torch.__version__}"
    )
    print(f"{'':40}{'without':>16}{'with':>16}")
    for name in programs:
        shown = (
            f"{statistics.median(one[name]):.0f} ({min(one[name]):.0f})"
            for one in (plain, recorded)
        )
        print(f"{name:40}" + "".join(f"{text:>16}" for text in shown))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
