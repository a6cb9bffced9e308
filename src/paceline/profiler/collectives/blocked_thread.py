"""Phase exchange while collectives block the program's thread."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch

from paceline.measure.phase_clock import PhaseClock
from paceline.profiler.collectives.log import CollectiveLog
from paceline.profiler.tracking.event_queue import Guard
from paceline.profiler.tracking.paused_steps import OUTSIDE


class Program(Protocol):
    """The thread that a clock measures."""

    recorder_seconds: float
    """What recording collectives took the program."""

    @property
    def clock(self) -> PhaseClock: ...

    def is_in_thread(self) -> bool: ...

    def expose(self, began: float, ended: float) -> None:
        """Between these times, the current phase was exposed communication."""

    def note_exposed(self, phase: str, seconds: float) -> None:
        """For so long, phase exchange interrupted a phase."""


class BlockedThread:
    def __init__(self, program: Program, guard: Guard) -> None:
        self.program = program
        self.section: list[tuple[CollectiveLog, int]] | None = None
        """The collectives of a C++ function that waits for them, while it runs."""
        self.entered = 0.0
        """When it was blocked last. Entering the phase takes time: events are interpreted first."""
        self._section_began = 0.0
        self._before_section: str | None = None
        self._guard = guard
        self.enter = guard(self._enter)
        self.leave = guard(self._leave)

    def _enter(self) -> str | None:
        """Enter phase exchange; returns the phase before it, or None if the thread is not blocked.

        A thread of the autograd engine blocks the program, which waits for the backward pass.
        Communication of evaluation and of checkpoints is part of them.
        """
        if not self.program.is_in_thread() and torch._C._current_graph_task_id() == -1:
            return None
        clock = self.program.clock
        before = clock.phase
        if before == "exchange":
            return None
        self.entered = perf_counter() if before in OUTSIDE else clock.enter("exchange")
        return before

    def _leave(self, before: str | None) -> float:
        """Return to the phase before; returns the time."""
        if before is None or before in OUTSIDE:
            return perf_counter()
        now = self.program.clock.enter(before)
        self.program.note_exposed(before, now - self.entered)
        return now

    def add_to_section(self, log: CollectiveLog, position: int) -> None:
        """The program is blocked from the first collective of a section to the end of it."""
        if self.section is not None and self.program.is_in_thread():
            if not self.section:
                self._before_section = self._enter()
                self._section_began = self.entered
            self.section.append((log, position))

    def make_section(self, original: Any) -> Any:
        """Make a function that blocks from its first collective to its end."""

        @self._guard
        def begin() -> bool:
            if self.section is not None or not self.program.is_in_thread():
                return False
            self.section = []
            return True

        @self._guard
        def end() -> None:
            records, self.section = self.section, None
            if records:
                now = self._leave(self._before_section)
                for log, position in records:
                    if not log.ended(position):
                        log.end(position, now)
                    log.block(position, self._section_began, log.ended(position))

        def function(*args: Any, **kwargs: Any) -> Any:
            if not begin():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                end()

        return function
