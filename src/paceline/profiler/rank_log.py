"""What one rank measured, appended to its event file in blocks.

The totals in each block are those since the start, so a reader needs only the last block of a
process that was killed. The first block is written after the second step, with the totals at the
end of the first: steps after the first are what reports compare.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch.distributed
from torch import Tensor

from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.errors import RunError, UsageError, error_line
from paceline.launch import environment
from paceline.measure.loss_block import LossBlock
from paceline.measure.procfs import process_age_seconds
from paceline.profiler import FOLDER_VARIABLE
from paceline.profiler.overhead import HookCosts
from paceline.profiler.step_window import StepWindow
from paceline.profiler.tracking.step_tracker import Loss, StepTracker
from paceline.records import EventWriter, RunFolder

BLOCK_SHARE = 0.6
"""Minimum time between blocks, as a share of the time that events wait. On a CPU, there is one
whenever events were interpreted: every half second, and later every second."""

Source = Callable[[], Iterable[tuple[str, dict[str, Any]]]]
"""Returns events with their values that are due with a block."""


@dataclass(frozen=True, slots=True)
class Totals:
    samples: int = 0
    checkpoints: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


class RankLog:
    """Writes nothing before the first step: most processes that import torch never take one."""

    def __init__(
        self,
        folder: RunFolder,
        costs: HookCosts,
        window: StepWindow,
        sources: Iterable[Source] = (),
    ) -> None:
        self.folder = folder
        self.window = window
        self.costs = costs
        self.sources = list(sources)
        self._rank: RankInfo | None = None
        """In the last process group that was destroyed."""
        self._events: EventWriter | None = None
        self._lock: int | None = None
        self._losses: list[Loss | None] = []
        self._first = 0
        self._block: LossBlock | None = None
        self._losses_of_block: list[Loss | None] = []
        self._before = Totals()
        """What precedes the first step to measure."""
        self._after_first: dict[str, float] = {}
        self._written = 0.0

    def note_rank(self) -> None:
        """Remember the rank: the first block may be written after its process group is gone."""
        self._rank = find_rank()

    def step(self, tracker: StepTracker) -> None:
        """Add the step that ended just now."""
        step = tracker.steps - self.window.first
        if step < 0:
            return
        if step == 0:
            tracker.clock.take_step_seconds(tracker.parts_of_first + tracker.steps - 1)
            self._before = Totals(tracker.samples, tracker.checkpoints, dict(tracker.clock.seconds))
            return
        if step == 1:
            # With several optimizers, the first step may end more than once.
            self._losses = [tracker.loss]
            self._after_first = self._phases(tracker.clock.seconds)
            return
        self._losses.append(tracker.loss)
        tracker.loss = None

    def write_due(self, tracker: StepTracker) -> None:
        """Write a block if it is time, as soon as its losses are known."""
        if self._block is None:
            has_steps = self._losses and tracker.steps >= self.window.first + 2
            interval = BLOCK_SHARE * tracker.events.interval
            if not has_steps or perf_counter() - self._written < interval:
                return
            self._close_block()
        if self._block is not None and self._block.is_ready():
            self._write(tracker)

    def close(self, tracker: StepTracker, error: BaseException | None = None) -> None:
        """Write what is left, and how the process ended."""
        if not (self._losses or self._events):
            return
        tracker.count_phase()
        if self._block is not None:
            self._write(tracker)
        # Without new steps, too: the totals have changed.
        self._close_block()
        events = self._write(tracker)
        status, cause = ("finished", None) if error is None else ("failed", error_line(error))
        events.write("end", status=status, cause=cause)
        self._close_files()

    def _close_files(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._lock is not None:
            os.close(self._lock)
        self._events = self._lock = None

    def _close_block(self) -> None:
        self._block = LossBlock([loss for loss in self._losses if isinstance(loss, Tensor)])
        self._losses_of_block, self._losses = self._losses, []

    def _write(self, tracker: StepTracker) -> EventWriter:
        assert self._block is not None
        clock = tracker.clock
        known, self._block = iter(self._block.values()), None
        losses = [
            next(known) if isinstance(loss, Tensor) else loss for loss in self._losses_of_block
        ]
        if self._events is None:
            self._events = self._open(tracker)
        clock.settle_ready()
        seconds = self._step_seconds(tracker, len(losses))
        measuring_seconds = self.costs.seconds(tracker)
        values: dict[str, Any] = {}
        if not self._first:
            values["after_first"] = self._after_first
        events = [event for source in self.sources for event in source()]
        iterations = dict(
            first=self._first,
            seconds=[round(value, 7) for value in seconds],
            loss=[_finite_or_none(value) for value in losses],
            learning_rate=tracker.learning_rate,
            samples=tracker.samples - self._before.samples,
            checkpoints=tracker.checkpoints - self._before.checkpoints,
            phases=self._phases(clock.known_seconds),
            measuring_seconds=round(measuring_seconds * tracker.delayed_share, 6),
            measuring_host_seconds=round(measuring_seconds, 6),
            **values,
            **({"paused_steps": tracker.paused_steps} if tracker.paused_steps else {}),
            **({"interruptions": taken} if (taken := tracker.take_interruptions()) else {}),
        )
        self._events.write_all([*events, ("iterations", iterations)])
        self._first += len(losses)
        self._written = perf_counter()
        return self._events

    def _phases(self, seconds: Mapping[str, float]) -> dict[str, float]:
        before = self._before.phases
        return {name: round(spent - before.get(name, 0.0), 6) for name, spent in seconds.items()}

    def _step_seconds(self, tracker: StepTracker, steps: int) -> list[float]:
        if self._first or self.window.first or not steps:
            return tracker.clock.take_step_seconds(steps)
        first = sum(tracker.clock.take_step_seconds(tracker.parts_of_first))
        return [first, *tracker.clock.take_step_seconds(steps - 1)]

    def _import_seconds(self, tracker: StepTracker) -> float:
        """The age of the process when torch was imported; 0 if that was before the profile."""
        if self.window.first or FOLDER_VARIABLE not in os.environ:
            return 0.0
        return max(0.0, process_age_seconds() - (perf_counter() - tracker.clock.started))

    def _open(self, tracker: StepTracker) -> EventWriter:
        """Open the file; RunError if another process writes it."""
        rank = self._rank
        if rank is None or torch.distributed.is_initialized():
            rank = find_rank()
        path = self.folder.events_file(rank.rank)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close_files()
            raise RunError(f"another process with rank {rank.rank} is measured already") from None
        events = EventWriter(path)
        events.write(
            "start",
            iteration=0,
            resumed=False,
            workers=rank.world_size,
            rank=rank.rank,
            node=rank.node_rank,
            process=os.getpid(),
            host=socket.gethostname(),
            perf_counter_offset=time.time() - perf_counter(),
            clock_started=tracker.clock.started + sum(self._before.phases.values()),
            imports_seconds=self._import_seconds(tracker),
            skipped_steps=self.window.first,
        )
        return events


def find_rank() -> RankInfo:
    """The rank in the default process group; without one, the rank that the launcher assigned."""
    try:
        known = environment.detect() or SINGLE_PROCESS
    except UsageError:
        # Scripts that start their ranks themselves set only the variables that they use.
        known = SINGLE_PROCESS
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        known = replace(known, rank=rank, world_size=world_size)
    return known


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
