"""Runs measurements in emulated clusters side by side, as long as there are cores for them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.2


def run_side_by_side(
    batches: Iterable[tuple[T, float]], run: Callable[[T], None], end: float
) -> None:
    """Run each batch in a process, in order, when the cores that it needs are free.

    A batch is its argument, which can be pickled, and its cores. None starts after `end`.
    """
    cores = float(os.cpu_count() or 1)
    # A thread could not start processes from a fork server while another one does.
    new = multiprocessing.get_context("spawn")
    running: list[tuple[multiprocessing.process.BaseProcess, float]] = []
    for argument, wanted in batches:
        needed = min(wanted, cores)
        while sum(used for _, used in running) + needed > cores + 1e-9:
            sleep(POLL_SECONDS)
            running = [one for one in running if one[0].is_alive()]
        if monotonic() > end:
            break
        process = new.Process(target=run, args=(argument,))
        process.start()
        running.append((process, needed))
    for started, _ in running:
        started.join()
