"""Runs the command of `paceline profile` and writes the result of the profile.

The command has the terminal: its input, output and exit code are passed through. Signals that
another process sends to this one are passed on; those of the terminal reach the command by itself.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import RunError, UsageError
from paceline.measure.sampler import ResourceSampler
from paceline.profiler import FOLDER_VARIABLE, STEPS_VARIABLE, TRACE_VARIABLE
from paceline.profiler.collection import discard_if_empty, settings_of_command, write_result
from paceline.profiler.post_mortem.watchdog import OnReport, Watchdog
from paceline.profiler.step_window import StepWindow
from paceline.records import Result, RunFolder, default_name

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell."""


class Outcome(NamedTuple):
    folder: RunFolder
    result: Result
    exit_code: int


def profile(
    command: Sequence[str],
    out: Path,
    name: str | None,
    steps: str = "",
    *,
    has_trace: bool = False,
    hang_seconds: float = 0.0,
    on_report: OnReport = lambda report: None,
) -> Outcome:
    """Run a command and return what its training processes measured.

    `on_report` is called with each post-mortem, from another thread. RunError if the result cannot
    be written; its exit code is that of the command.
    """
    StepWindow.parse(steps)
    settings = settings_of_command(command, name, steps, has_trace=has_trace)
    script = settings.script or command[0]
    path = out / (name or default_name(out, Path(script.split()[0]).stem, "profile"))
    folder = RunFolder.create_at(path, settings)
    with folder.locked():
        watchdog = Watchdog(folder, hang_seconds, on_report)
        began = time.perf_counter()
        running = _RunningCommand(command, folder, steps, has_trace, watchdog)
        watchdog.start()
        exit_code = running.wait()
        command_seconds = time.perf_counter() - began
        warning = running.sampler.stop()
        reports = watchdog.stop()
        status, cause = describe_end(command[0], exit_code, running.received)
        warnings = [warning] if warning else []
        exit_code = exit_code if exit_code >= 0 else 128 - exit_code
        try:
            result = write_result(
                folder,
                settings,
                status,
                cause,
                warnings,
                reports,
                watchdog.ends,
                command_seconds,
            )
            discard_if_empty(folder, result)
        except (RunError, OSError) as error:
            failure = RunError(f"the records are incomplete: {error}")
            failure.exit_code = exit_code
            raise failure from None
    return Outcome(folder, result, exit_code)


def describe_end(
    program: str, exit_code: int, received: Sequence[signal.Signals]
) -> tuple[str, str | None]:
    """Status and cause of a command that ended."""
    if exit_code == 0:
        return "finished", None
    if stops := [number for number in received if number in ENDING]:
        return "stopped", f"stopped by {stops[0].name}"
    if exit_code < 0:
        return "failed", f"{program} was killed by {_signal_name(-exit_code)}"
    return "failed", f"{program} ended with exit code {exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _RunningCommand:
    """A command with the signals that are passed on to it."""

    def __init__(
        self,
        command: Sequence[str],
        folder: RunFolder,
        steps: str,
        has_trace: bool,
        watchdog: Watchdog,
    ) -> None:
        self.received: list[signal.Signals] = []
        self._watchdog = watchdog
        # Blocked signals wait until `wait` takes them, with their senders.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
        environment = {**os.environ, FOLDER_VARIABLE: str(folder.path.resolve())}
        if steps:
            environment[STEPS_VARIABLE] = steps
        if has_trace:
            environment[TRACE_VARIABLE] = "1"
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                # The mask outlasts exec.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, self._mask),
            )
        except OSError as error:
            self._restore_signals()
            folder.discard()
            raise UsageError(f"cannot run {shlex.quote(command[0])}: {error.strerror}") from None
        self.sampler = ResourceSampler(folder.resources_file(0), [self._process.pid])
        self.sampler.start()

    def wait(self) -> int:
        """Wait until the command ends; returns its exit code, or minus the signal that ended it."""
        try:
            while (exit_code := self._process.poll()) is None:
                self._pass_on(signal.sigwaitinfo((*PASSED_ON, signal.SIGCHLD)))
        finally:
            self._restore_signals()
        return exit_code

    def _pass_on(self, info: signal.struct_siginfo) -> None:
        if info.si_signo == signal.SIGCHLD:
            return
        number = signal.Signals(info.si_signo)
        self.received.append(number)
        is_of_terminal = info.si_code > 0
        if number in ENDING:
            self._watchdog.before_stop()
        if not is_of_terminal:
            self._process.send_signal(number)

    def _restore_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
