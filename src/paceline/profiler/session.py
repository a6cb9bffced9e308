"""The profiler of one process, from `import torch` to its end."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from paceline.errors import error_line
from paceline.profiler import WARNINGS_FILE
from paceline.profiler.overhead import measure_hook_costs
from paceline.profiler.post_mortem.process_facts import ProcessFacts
from paceline.profiler.process_use import process_use
from paceline.profiler.rank_log import RankLog
from paceline.profiler.recording_windows import RecordingWindows
from paceline.profiler.step_window import StepWindow
from paceline.profiler.trace import TraceLog
from paceline.profiler.tracking.device_copies import DeviceCopies
from paceline.profiler.tracking.hooks import Hooks, never_compile
from paceline.profiler.tracking.script_calls import ScriptCalls
from paceline.profiler.tracking.step_tracker import StepTracker
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.profiler.collectives.recorder import CollectiveRecorder


class Session:
    """Measures this process until it is closed; an error closes it and leaves the script alone."""

    def __init__(
        self, folder: Path, window: StepWindow | None = None, *, has_trace: bool = False
    ) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._is_open = True
        self.log = RankLog(
            RunFolder(folder), measure_hook_costs(self.guard), window or StepWindow()
        )
        self.tracker = StepTracker(self._end_step, self._count_copies, self.guard)
        probe = self.log.costs.probe
        self.tracker.events.is_ready = lambda: probe.has_ended(self.tracker.events.updates)
        self.tracker.events.on_flush = self._flushed
        self._trace: TraceLog | None = None
        if has_trace:
            self._trace = TraceLog(self.tracker, self.log.window.first)
            self.log.sources.append(self._trace.events)
        self._hooks = Hooks()
        self.log.sources.append(self._hooks.hook_imported)
        self._facts: ProcessFacts | None = None
        self._calls = ScriptCalls(self.tracker)
        self._copies = DeviceCopies(self.tracker)
        self.log.sources.append(self._use)
        self._collectives: CollectiveRecorder | None = None
        self._windows: RecordingWindows | None = None

    def start(self) -> None:
        try:
            self._install()
        except BaseException:
            self._is_open = False
            if self._facts is not None:
                self._facts.stop()
                self._facts.remove()
            self.remove()
            raise

    def _install(self) -> None:
        self._facts = self.guard(ProcessFacts)(self.folder)
        self._hooks.install(self.tracker, self.guard)
        self._calls.install(self._hooks, self.guard)
        if torch.distributed.is_available():
            from paceline.profiler.collectives.recorder import CollectiveRecorder

            self._collectives = CollectiveRecorder(self.tracker, self.folder, self.guard)
            self._collectives.before_shutdown = self.guard(self.log.note_rank)
            self._collectives.install()
        # A trace, or a part of the steps, is recorded as a whole.
        if self._trace is None and self.log.window == StepWindow():
            self._windows = self._recording_windows()

    def _recording_windows(self) -> RecordingWindows:
        recorder = self._collectives
        if recorder is None:
            return RecordingWindows(self.tracker, self.log.costs, self.guard)
        from paceline.profiler.collectives.pauses import CollectivePauses

        pauses = CollectivePauses(recorder, self.tracker)
        windows = RecordingWindows(self.tracker, self.log.costs, self.guard, pauses)
        recorder.before_call = windows.before_call
        return windows

    def _flushed(self) -> None:
        if self._windows is not None:
            self._windows.settle()
        # Not after each step: what is read from the system is that of the steps noted so far.
        self.log.write_due(self.tracker)

    def _count_copies(self) -> None:
        try:
            self._copies.install(self._hooks, self.guard)
        except (ImportError, AttributeError, TypeError) as error:
            # It uses internals of torch.compile, which other versions may not have.
            warn(self.folder, f"copies to the GPU are not counted: {error_line(error)}")

    def _end_step(self) -> None:
        if not self._is_open:
            return
        if self._trace is not None:
            self._trace.step()
        self._calls.end_step()
        if self._collectives is not None:
            self._collectives.end_step()
        self.log.step(self.tracker)
        if not self.tracker.events.is_deferred:
            self.log.write_due(self.tracker)
        if self.log.window.is_over(self.tracker.steps):
            self._stop()
            if self._facts is not None:
                self._facts.stop()

    def _use(self) -> Iterator[tuple[str, dict[str, Any]]]:
        calls = self._calls.due_records()
        if calls:
            calls |= self._copies.records()
        yield "facts", {"steps": self.tracker.steps, **process_use(), **calls}

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that never raises: an exception ends the session."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            if self._is_open:
                try:
                    return function(*args)
                except Exception as error:  # noqa: BLE001 (a profiler must not stop the script)
                    self.fail(error)
            return None

        return never_compile(call, with_callees=True)

    def fail(self, error: Exception) -> None:
        self._is_open = False
        warn(self.folder, f"the profiler stopped: {error_line(error)}")
        if self._facts is not None:
            self._facts.stop()
        if self._windows is not None:
            self._windows.remove()
        # Not the kernels of the dispatcher: one of them may have failed, and is still running.
        self._remove_hooks(is_in_hook=True)

    def end_step(self) -> None:
        """End a step here; from now on, optimizers do not end steps."""
        self.guard(self.tracker.end_step_here)()

    def divide_cells(self) -> None:
        """A cell of a notebook begins or ends here."""
        self.guard(self.tracker.divide_cells)()

    def close(self, error: BaseException | None = None) -> None:
        """Write what is left and remove all hooks; `error` ended the training."""
        # A forked process inherits the session of its parent.
        if os.getpid() == self._process:
            self._stop(error)
            if self._facts is not None:
                self._facts.close()
            self.remove()

    def continue_in_child(self) -> None:
        """In a forked process: measure it, unless its parent trains already.

        Hooks stay in place: removing them could wait for a lock of a thread that was not forked.
        """
        has_collectives = self._collectives is not None and self._collectives.log is not None
        if self.tracker.steps or has_collectives:
            self._is_open = False
            self.tracker.stop()
        else:
            self._process = os.getpid()
            self._facts = self.guard(ProcessFacts)(self.folder)

    def _stop(self, error: BaseException | None = None) -> None:
        self.tracker.events.flush_all()
        if self._is_open:
            self._calls.finish()
            if self._trace is not None:
                self._trace.close()
            if self._windows is not None:
                self.guard(self._windows.close)(error is not None)
            self.guard(self.log.close)(self.tracker, error)
            steps, first = self.tracker.steps, self.log.window.first
            if 0 < steps <= first:
                text = f"the script took {steps:,} steps; --steps starts at {first:,}"
                warn(self.folder, text, steps=steps)
            self._is_open = False
            self._remove_hooks(is_in_hook=True)

    def _remove_hooks(self, *, is_in_hook: bool = False) -> None:
        self.tracker.stop()
        self._hooks.remove(is_in_hook=is_in_hook)

    def remove(self) -> None:
        """Remove all hooks."""
        self._remove_hooks()
        if self._windows is not None:
            self._windows.remove()
        if self._collectives is not None:
            self._collectives.remove()


def warn(folder: Path, text: str, **more: Any) -> None:
    """Leave a warning for `paceline profile`; nothing if the folder cannot be written to."""
    try:
        with (folder / WARNINGS_FILE).open("a", encoding="utf-8") as file:
            values = {"event": "warning", "time": time.time(), "process": os.getpid(), "text": text}
            file.write(json.dumps({**values, **more}) + "\n")
    except OSError:
        pass


_active: list[Session] = []
"""At most one: the hooks belong to the process."""


def active() -> Session | None:
    return _active[0] if _active else None


def start(folder: str, steps: str = "", *, has_trace: bool = False) -> Session | None:
    """Start a session that lasts until `stop` or the end of the process."""
    try:
        session = Session(Path(folder), StepWindow.parse(steps), has_trace=has_trace)
        session.start()
    except Exception as error:  # noqa: BLE001 (as above)
        warn(Path(folder), f"the profiler did not start: {error_line(error)}")
        return None
    _active[:] = [session]
    atexit.register(_close_active)
    return session


def stop(session: Session, error: BaseException | None = None) -> None:
    session.close(error)
    _active.clear()


def _close_active() -> None:
    # The exception that ends the process; multiprocessing handles it only after this.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    for session in _active:
        session.close(None if isinstance(error, SystemExit) else error)


def _continue_in_child() -> None:
    for session in _active:
        session.continue_in_child()


os.register_at_fork(after_in_child=_continue_in_child)
# Forked processes of multiprocessing end without the functions of atexit.
register_after_fork(_close_active, lambda close: Finalize(None, close, exitpriority=0))
