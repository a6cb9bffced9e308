"""Stops recording collectives for some steps.

In a pause, kernels are disabled. Process groups themselves count their collectives, so each record
still has the number that all ranks know it by. Only the C++ code of DDP issues collectives then,
which are alike in all steps: a call of the script ends the pause before it is issued
(`CollectiveRecorder.before_call`). What is in progress when training stops is read from PyTorch's
flight recorder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed import distributed_c10d

from paceline.profiler.collectives.flight_recorder import number_of
from paceline.profiler.collectives.paused_calls import PausedCalls, are_traced

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder
    from paceline.profiler.tracking.step_tracker import StepTracker


@dataclass(frozen=True, slots=True)
class Counted:
    """Up to the beginning of a window."""

    script_calls: int
    other_records: int


class CollectivePauses:
    """Pauses and resumes a recorder, on the training thread."""

    def __init__(self, recorder: CollectiveRecorder, tracker: StepTracker) -> None:
        self._recorder, self._tracker = recorder, tracker
        self._are_traced: bool | None = None
        """Whether the flight recorder agrees with the log; None before it was compared."""
        self._paused_calls: PausedCalls | None = None

    @property
    def has_groups(self) -> bool:
        """Whether the program communicates at all."""
        return self._recorder.log is not None

    def counted(self) -> Counted:
        return Counted(self._recorder.script_calls, self._recorder.other_records)

    def begin(self) -> None:
        """The first window begins: since the first step it is known which thread trains."""
        self._recorder.calls_of_other_threads = 0

    def forbid(self) -> None:
        """Another thread issues collectives: kernels must not be disabled while it is in one."""
        self._recorder.can_pause = False

    def can_pause(self, window: Counted) -> bool:
        """Whether the steps after a window may have no records."""
        recorder = self._recorder
        if recorder.log is None:
            return True
        calls = recorder.script_calls - window.script_calls
        if recorder.other_records - window.other_records > calls:
            # C++ code issues others than those of DDP, which would not end a pause.
            recorder.can_pause = False
        if calls or not recorder.can_pause or recorder.calls_of_other_threads:
            return False
        numbers = self._numbers()
        for known in recorder.groups.values():
            if known.index in numbers and numbers[known.index] != known.calls():
                recorder.can_pause = False
                return False
        if self._are_traced is None:
            self._are_traced = are_traced(recorder.log, recorder.groups)
        return self._are_traced

    def pause(
        self,
        updates: int,
        moment: float,
        step_seconds: float,
        *,
        window_updates: int,
        window_began: float,
        exchange: float,
    ) -> None:
        """`exchange`: the seconds of that phase when the window began."""
        recorder = self._recorder
        if recorder.log is None:
            return
        recorder.end_step()
        recorder.kernels.disable()
        recorder.log.describe(
            "pause",
            updates=updates,
            moment=moment,
            calls=self._counts(),
            window_began=window_began,
            window_updates=window_updates,
            exchange=exchange,
        )
        if self._paused_calls is None:
            self._paused_calls = PausedCalls(
                recorder.log, self._tracker, recorder.guard, self._numbers
            )
        self._paused_calls.begin(dict(recorder.groups), step_seconds)

    def resume(self, updates: int, moment: float) -> None:
        """Record from now on; nothing if there was no process group before the pause."""
        if self._paused_calls is None:
            return
        self._paused_calls.end()
        numbers = self._numbers()
        for known in self._recorder.groups.values():
            if known.index in numbers:
                known.continue_at(numbers[known.index])
        self.describe_end(updates, moment)
        self._recorder.kernels.enable()

    def describe_end(self, updates: int, moment: float) -> None:
        """Write when a pause ended."""
        log = self._recorder.log
        if log is not None and self._paused_calls is not None:
            log.describe("resume", updates=updates, moment=moment, calls=self._counts())

    def remove(self, *, has_failed: bool = False) -> None:
        """Stop the thread that watches pauses, before the log is closed."""
        if self._paused_calls is not None:
            self._paused_calls.remove(has_failed=has_failed)

    def _numbers(self) -> dict[int, int]:
        """How many collectives each group was called for since its first record."""
        found = {}
        # A copy, because another thread calls this, too.
        for group in list(distributed_c10d._world.pg_map):
            known = self._recorder.groups.get(group.group_name)
            number = number_of(group) if known is not None else None
            if known is not None and number is not None:
                found[known.index] = number - known.calls_before
        return found

    def _counts(self) -> dict[str, int]:
        return {str(index): number for index, number in self._numbers().items()}
