"""When the thread of a program is blocked by collectives."""

from __future__ import annotations

from time import sleep
from typing import Any

from paceline.measure.phase_clock import PhaseClock
from paceline.profiler.collectives.blocked_thread import BlockedThread


class Program:
    """Interpreting its events takes 20 ms."""

    recorder_seconds = 0.0

    def __init__(self) -> None:
        self._clock = PhaseClock()
        self.log = self._clock.start_log()

    @property
    def clock(self) -> PhaseClock:
        sleep(0.02)
        return self._clock

    def is_in_thread(self) -> bool:
        return True

    def expose(self, began: float, ended: float) -> None:
        raise NotImplementedError

    def note_exposed(self, phase: str, seconds: float) -> None:
        assert phase == "other"


class Log:
    """What is blocked by which record."""

    def __init__(self) -> None:
        self.ends: dict[int, float] = {}
        self.blocked: list[tuple[int, float, float]] = []

    def ended(self, position: int) -> float:
        return self.ends.get(position, 0.0)

    def end(self, position: int, moment: float) -> None:
        self.ends[position] = moment

    def block(self, position: int, began: float, ended: float) -> None:
        self.blocked.append((position, began, ended))


def test_a_section_blocks_as_long_as_phase_exchange() -> None:
    program, log = Program(), Log()
    blocked = BlockedThread(program, lambda function: function)
    recorded: Any = log

    @blocked.make_section
    def function() -> None:
        for position in range(2):
            blocked.add_to_section(recorded, position)
        sleep(0.01)

    function()
    (span,) = [span for span in program.log.phases if span.name == "exchange"]
    assert log.blocked == [(position, span.began, span.ended) for position in range(2)]
    assert blocked.entered == span.began
