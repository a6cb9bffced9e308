"""Readers of the events of one worker."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.curves import Floats
from paceline.analysis.validation import is_number
from paceline.records import NUMBER_MAX, open_record, read_lines

IN_ITERATION = ("input", "forward", "backward", "update", "exchange", "wait")
"""Phases of an iteration: compute, then communication."""

TAIL_BYTES = 4096
"""Longer than the last line of a file, which records how the worker ended."""
EXACT_FLOAT_LIMIT = 2**53
"""Integers below this are exact as floats."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive iterations, from `first` on."""

    first: int
    seconds: Floats
    losses: Floats
    """NaN where a loss was not finite."""
    phases: dict[str, float] | None
    """Seconds by phase that the process had spent in iterations when it wrote the block."""
    process: int
    """Counts the processes that have had this rank."""
    began: int
    """The first iteration of the process."""

    @property
    def end(self) -> int:
        return self.first + len(self.seconds)


@dataclass(frozen=True, slots=True)
class Later:
    """Iterations after the first block, which holds the first iteration."""

    count: int
    seconds: float
    phases: dict[str, float]


@dataclass(frozen=True)
class WorkerEvents:
    """Iterations in order; of repeated ones, the last time counts.

    A worker that left and joined again has gaps between its blocks.
    """

    blocks: list[Block]
    starts: list[tuple[int, int]] = field(default_factory=list)
    """First iteration and world size of each process."""

    @cached_property
    def index(self) -> NDArray[np.int64]:
        return np.concatenate([np.arange(block.first, block.end) for block in self.blocks])

    @cached_property
    def seconds(self) -> Floats:
        return np.concatenate([block.seconds for block in self.blocks])

    @cached_property
    def losses(self) -> Floats:
        return np.concatenate([block.losses for block in self.blocks])

    @property
    def end(self) -> int:
        return self.blocks[-1].end if self.blocks else 0

    @property
    def processes(self) -> int:
        """The number of processes that ran these iterations, one after the other."""
        return len({block.process for block in self.blocks})

    def since(self, iteration: int) -> WorkerEvents:
        """The iterations of processes that started at `iteration` or later."""
        return WorkerEvents([block for block in self.blocks if block.began >= iteration])

    def phases(self) -> dict[str, float] | None:
        """Seconds of these iterations by phase; None if they were not recorded."""
        ends = {block.process: block.phases for block in self.blocks}
        known = [phases for phases in ends.values() if phases is not None]
        if not known or len(known) < len(ends):
            return None
        return {phase: math.fsum(one[phase] for one in known) for phase in IN_ITERATION}

    def later(self) -> Later | None:
        """The iterations after the first block; None without phases or further blocks."""
        first, everything = self.blocks[0], self.phases()
        if everything is None or first.phases is None or len(self.blocks) < 2:
            return None
        return Later(
            len(self.seconds) - len(first.seconds),
            float(self.seconds.sum() - first.seconds.sum()),
            {phase: everything[phase] - first.phases[phase] for phase in IN_ITERATION},
        )


def read_iterations(path: Path) -> WorkerEvents:
    """Skips malformed lines, and blocks after a gap.

    Only the first block of a new process may leave a gap.
    """
    blocks: list[Block] = []
    starts: list[tuple[int, int]] = []
    process, began, is_new = 0, 0, False
    for event in read_lines(path):
        if event.get("event") == "start" and _is_count(event.get("iteration")):
            process, began, is_new = process + 1, event["iteration"], True
            if _is_count(event.get("workers")):
                starts.append((began, event["workers"]))
        if event.get("event") != "iterations":
            continue
        block = _block(event, process, began)
        if block is None or (block.first > (blocks[-1].end if blocks else 0) and not is_new):
            continue
        _cut(blocks, block.first)
        blocks.append(block)
        is_new = False
    return WorkerEvents(blocks, starts)


def _cut(blocks: list[Block], first: int) -> None:
    """Remove iterations from `first` on, which are repeated."""
    while blocks and blocks[-1].end > first:
        last = blocks.pop()
        kept = first - last.first
        if kept > 0:
            blocks.append(
                Block(
                    last.first,
                    last.seconds[:kept],
                    last.losses[:kept],
                    last.phases,
                    last.process,
                    last.began,
                )
            )


def _block(event: dict[str, Any], process: int, began: int) -> Block | None:
    first, phases = event.get("first"), event.get("phases")
    try:
        seconds = np.array(event["seconds"], dtype=np.float64)
        # The losses of a profiled script may be unknown.
        losses = np.array(event.get("loss", [None] * len(seconds)), dtype=np.float64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    fits = seconds.ndim == 1 and seconds.shape == losses.shape and len(seconds) > 0
    is_time = ((seconds >= 0) & (seconds < NUMBER_MAX)).all()
    if not fits or not is_time or not _is_count(first):
        return None
    is_whole = isinstance(phases, dict) and all(is_number(phases.get(one)) for one in IN_ITERATION)
    spent = {one: float(phases[one]) for one in IN_ITERATION} if phases and is_whole else None
    return Block(first, seconds, losses, spent, process, began)


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < EXACT_FLOAT_LIMIT


EVALUATION_KEYS = (
    "iteration", "epoch", "rank", "test_loss", "learning_rate", "wall_seconds",
)  # fmt: skip


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The evaluations in a worker's events; what a resumed run repeated appears once.

    Parses only lines that may be an evaluation, since most events are others.
    """
    found: list[dict[str, Any]] = []
    try:
        with open_record(path) as file:
            for line in file:
                if b'"evaluation"' in line or b'"start"' in line:
                    _add_evaluation(line, found)
    except OSError:
        return []
    return found


def _add_evaluation(line: bytes, found: list[dict[str, Any]]) -> None:
    """Ignores truncated lines and other events."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return
    kind = event.get("event") if isinstance(event, dict) else None
    if kind == "start" and is_number(event.get("iteration")):
        while found and found[-1]["iteration"] > event["iteration"]:
            found.pop()
    if kind == "evaluation" and all(is_number(event.get(key)) for key in EVALUATION_KEYS):
        found.append(event)


def has_end(path: Path) -> bool:
    """Whether the last event of a worker is its end; reads only the last bytes of the file."""
    try:
        with open_record(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            last = file.read().splitlines()[-1:]
        event = json.loads(last[0]) if last else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("event") == "end"
