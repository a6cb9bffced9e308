"""The profiler of one process, from `import torch` to its end."""

from __future__ import annotations

import atexit
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from paceline.errors import error_line
from paceline.profiler import WARNINGS_FILE
from paceline.profiler.hooks import Hooks
from paceline.profiler.overhead import measure_hook_costs
from paceline.profiler.rank_log import RankLog
from paceline.profiler.step_tracker import StepTracker
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.profiler.collectives import CollectiveRecorder


class Session:
    """Measures this process until it is closed; an error closes it and leaves the script alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._is_open = True
        self.log = RankLog(RunFolder(folder), measure_hook_costs(self.guard))
        self.tracker = StepTracker(lambda: self.log.step(self.tracker))
        self._hooks = Hooks()
        self._collectives: CollectiveRecorder | None = None

    def start(self) -> None:
        self._hooks.install(self.tracker, self.guard)
        if torch.distributed.is_available():
            from paceline.profiler.collectives import CollectiveRecorder

            self._collectives = CollectiveRecorder(self.tracker, self._folder, self.guard)
            self._collectives.install()

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

        return call

    def fail(self, error: Exception) -> None:
        self._is_open = False
        warn(self._folder, f"the profiler stopped: {error_line(error)}")
        # Not the kernels of the dispatcher: one of them may have failed, and is still running.
        self._hooks.remove()

    def close(self) -> None:
        """Write what is left and remove all hooks."""
        # A forked process inherits the session of its parent.
        if os.getpid() == self._process:
            self.guard(self.log.close)(self.tracker)
            self.remove()
        self._is_open = False

    def remove(self) -> None:
        """Remove all hooks."""
        self._hooks.remove()
        if self._collectives is not None:
            self._collectives.remove()


def warn(folder: Path, text: str) -> None:
    """Leave a warning for `paceline profile`; nothing if the folder cannot be written to."""
    try:
        with (folder / WARNINGS_FILE).open("a", encoding="utf-8") as file:
            values = {"event": "warning", "time": time.time(), "process": os.getpid(), "text": text}
            file.write(json.dumps(values) + "\n")
    except OSError:
        pass


def start(folder: str, steps: str = "") -> Session | None:
    """Start a session that lasts until the process ends."""
    try:
        session = Session(Path(folder))
        session.start()
    except Exception as error:  # noqa: BLE001 (as above)
        warn(Path(folder), f"the profiler did not start: {error_line(error)}")
        return None
    atexit.register(session.close)

    def restart() -> None:
        # A forked process may train, too.
        nonlocal session
        session.remove()
        atexit.unregister(session.close)
        session = Session(Path(folder))
        session.start()
        atexit.register(session.close)

    os.register_at_fork(after_in_child=session_guard(restart, folder))
    return session


def session_guard(function: Callable[[], None], folder: str) -> Callable[[], None]:
    def call() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 (as above)
            warn(Path(folder), f"the profiler did not start: {error_line(error)}")

    return call
