"""Makes measurements in emulated clusters side by side, as long as there are cores for them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Protocol

from paceline.errors import RunError
from paceline.plan.measurement import ShortRuns

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Batch:
    """Measurements that one process makes, one after another."""

    names: tuple[str, ...]
    workers: int
    """At most."""


class Measurer(Protocol):
    """Makes the measurement of a name, and records it."""

    def measure(self, name: str) -> None: ...


def measure_side_by_side(
    batches: Iterable[Batch], cpus: float, end: float, start: Callable[[ShortRuns], Measurer]
) -> None:
    """Make the measurements of each batch in a process, in order, when the cores are free.

    A worker uses `cpus` cores. `start`, which can be pickled, is called in the process. No
    measurement starts after `end`.
    """
    cores = float(os.cpu_count() or 1)
    # A thread could not start processes from a fork server while another one does.
    new = multiprocessing.get_context("spawn")
    running: list[tuple[multiprocessing.process.BaseProcess, float]] = []
    for batch in batches:
        needed = min(batch.workers * cpus, cores)
        while sum(used for _, used in running) + needed > cores + 1e-9:
            sleep(POLL_SECONDS)
            running = [one for one in running if one[0].is_alive()]
        if monotonic() > end:
            break
        process = new.Process(target=_measure, args=(batch, end, start))
        process.start()
        running.append((process, needed))
    for started, _ in running:
        started.join()


def _measure(batch: Batch, end: float, start: Callable[[ShortRuns], Measurer]) -> None:
    with ShortRuns() as runs:
        measurer = start(runs)
        for name in batch.names:
            began = monotonic()
            if began > end:
                break
            try:
                measurer.measure(name)
            except RunError as error:
                print(f"{name}: {error}", flush=True)
            print(f"{name}: {monotonic() - began:.1f} s", flush=True)
