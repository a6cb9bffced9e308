"""The timeline of a profile: waits in the exchange, and steps as they are counted."""

from __future__ import annotations

from paceline.measure.phase_clock import PhaseClock
from paceline.measure.trace_file import TraceEvent
from paceline.profiler.trace import TraceLog, merge_slices, split_waits


def test_exchange_is_split_where_a_rank_waited() -> None:
    phases = [
        TraceEvent("backward", 0, 4),
        TraceEvent("exchange", 4, 9),
        TraceEvent("update", 9, 10),
        TraceEvent("exchange", 10, 12),
        TraceEvent("exchange", 12, 13),
    ]
    waits = [(1.0, 2.0), (3.0, 5.0), (6.0, 7.0), (11.0, 12.5)]
    assert list(split_waits(phases, waits)) == [
        TraceEvent("backward", 0, 4),
        TraceEvent("wait", 4, 5),
        TraceEvent("exchange", 5, 6),
        TraceEvent("wait", 6, 7),
        TraceEvent("exchange", 7, 9),
        TraceEvent("update", 9, 10),
        TraceEvent("exchange", 10, 11),
        TraceEvent("wait", 11, 12),
        TraceEvent("wait", 12, 12.5),
        TraceEvent("exchange", 12.5, 13),
    ]


def test_slices_of_one_phase_are_joined_within_a_step() -> None:
    phases = [
        TraceEvent("backward", 0, 2),
        TraceEvent("backward", 2, 3),
        TraceEvent("update", 3, 4),
        TraceEvent("update", 4, 5),
        TraceEvent("other", 5, 6),
        TraceEvent("other", 6, 7),
        TraceEvent("other", 8, 9),
    ]
    assert list(merge_slices(phases, boundaries={6})) == [
        TraceEvent("backward", 0, 3),
        TraceEvent("update", 3, 5),
        TraceEvent("other", 5, 6),
        TraceEvent("other", 6, 7),
        TraceEvent("other", 8, 9),
    ]


class FakeTracker:
    def __init__(self) -> None:
        self.clock = PhaseClock()
        self.steps = 0
        self.parts_of_first = 1

    def step(self, log: TraceLog) -> None:
        self.clock.end_step("other")
        self.clock.begin_step("other")
        self.steps += 1
        log.step()


def logged(log: TraceLog) -> list[tuple[int, int]]:
    """The first step and the number of steps of each event."""
    return [(values["first"], len(values["steps"])) for _, values in log.events()]


def test_phases_are_written_a_block_later_and_all_at_the_end() -> None:
    """Until then, communication may turn out to be exposed."""
    tracker = FakeTracker()
    log = TraceLog(tracker, 0)  # type: ignore[arg-type]
    tracker.step(log)
    tracker.step(log)
    assert logged(log) == []
    tracker.step(log)
    assert logged(log) == [(0, 2)]
    tracker.step(log)
    log.close()
    assert logged(log) == [(0, 2)]
    assert logged(log) == []


def test_log_begins_with_the_first_selected_step() -> None:
    tracker = FakeTracker()
    log = TraceLog(tracker, 2)  # type: ignore[arg-type]
    for _ in range(5):
        tracker.step(log)
    log.close()
    assert logged(log) == [(2, 3)]


def test_first_step_of_two_optimizers_is_one_step() -> None:
    tracker = FakeTracker()
    log = TraceLog(tracker, 0)  # type: ignore[arg-type]
    tracker.step(log)
    tracker.steps, tracker.parts_of_first = 0, 2
    tracker.step(log)
    tracker.step(log)
    log.close()
    assert logged(log) == [(0, 2)]
