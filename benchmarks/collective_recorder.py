"""What recording collectives costs the program: `python benchmarks/collective_recorder.py`.

Two ranks on this machine, with and without the recorder in turn, in blocks of the same processes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.measure.phase_clock import PhaseClock
from paceline.profiler.collectives import CollectiveRecorder

CALLS, ROUNDS, RANKS = 50, 20, 2


class MainThread:
    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.recorder_seconds = 0.0
        self._thread = threading.get_ident()

    def is_in_thread(self) -> bool:
        return threading.get_ident() == self._thread


def seconds_per_call(function: Callable[[], object]) -> float:
    dist.barrier()
    began = perf_counter()
    for _ in range(CALLS):
        function()
    return (perf_counter() - began) / CALLS


def measure(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)  # type: ignore[attr-defined]  # no stub
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    tensor, batch = torch.ones(16), torch.ones(4, 8)
    model = DistributedDataParallel(nn.Linear(8, 8))
    convolutions = nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.Flatten(), nn.Linear(6400, 84)
    )
    larger, images = DistributedDataParallel(convolutions), torch.ones(8, 1, 28, 28)
    programs: dict[str, Callable[[], object]] = {
        "all_reduce of 64 bytes": lambda: dist.all_reduce(tensor),
        "the same, asynchronous": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "DDP, 288 bytes": lambda: model(batch).sum().backward(),
        "DDP, 2.1 MiB": lambda: larger(images).sum().backward(),
    }
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            recorder = CollectiveRecorder(MainThread(), folder)
            times.setdefault((name, False), []).append(seconds_per_call(program))
            recorder.install()
            times.setdefault((name, True), []).append(seconds_per_call(program))
            recorder.remove()
    if rank == 0:
        print(f"us per call, median (minimum) of {ROUNDS} x {CALLS}, torch {torch.__version__}")
        print(f"{'':26}{'without':>20}{'with':>20}{'added':>8}")
        for name in programs:
            plain, recorded = ([each * 1e6 for each in times[name, on]] for on in (False, True))
            shown = [f"{statistics.median(one):.0f} ({min(one):.0f})" for one in (plain, recorded)]
            added = statistics.median(b - a for a, b in zip(plain, recorded, strict=True))
            print(f"{name:26}{shown[0]:>20}{shown[1]:>20}{added:>8.0f}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                measure(rank, Path(folder))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
