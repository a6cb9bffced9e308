"""Watches the ranks of a profile, and examines them when they stop or one of them ends.

It runs in a thread of `paceline profile`. Ranks on other machines are seen only by their files.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.profiler import POST_MORTEM_FILE
from paceline.profiler.collectives.log import RankCollectives, read_logs
from paceline.profiler.post_mortem.examination import (
    PostMortem,
    RankState,
    find_mismatches,
    find_pending,
    last_progress,
)
from paceline.profiler.post_mortem.process_facts import ProcessRecord, read_processes, request_stack
from paceline.records import RunFolder, read_lines, write_json

INTERVAL_SECONDS = 0.25
STOPPED_SECONDS = 5.0
"""A job that is stopped after so long without progress is examined first."""

CLEAN_EXIT = "exited with code 0"

OnReport = Callable[[dict[str, Any]], None]


class _End(NamedTuple):
    time: float
    text: str


class Watchdog:
    """Examines at most once per pause in progress. `hang_seconds` 0: hangs are not looked for."""

    def __init__(self, folder: RunFolder, hang_seconds: float, on_report: OnReport) -> None:
        self.reports: list[dict[str, Any]] = []
        self._folder, self._hang_seconds, self._on_report = folder, hang_seconds, on_report
        self._ended: dict[int, _End] = {}
        """By process id."""
        self._watched: dict[int, int] = {}
        """Process ids by descriptor."""
        self._known: set[int] = set()
        self._has_new_ends = False
        self._examined_progress = 0.0
        self._next_check = 0.0
        self._has_failure = self._is_stopping = False
        """Whether a rank failed, or a signal ends the job: what follows is the effect."""
        self._poller = select.poll()
        self._wake = os.eventfd(0)
        self._poller.register(self._wake, select.POLLIN)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> list[dict[str, Any]]:
        """Stop watching; returns all reports."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._watch_new()
        for descriptor, _ in self._poller.poll(0):
            self._note_end(descriptor)
        self._examine_deaths()
        for descriptor in [*self._watched, self._wake]:
            os.close(descriptor)
        return self.reports

    @property
    def ends(self) -> dict[int, float]:
        """When processes ended, as time of day, by process id."""
        return {process: end.time for process, end in self._ended.items()}

    def before_stop(self) -> None:
        """Examine the ranks before a signal ends them, if they have made no progress for long."""
        with self._lock:
            if self._is_stopping:
                return
            self._is_stopping = True
            logs = self._logs()
            progress = self._last_progress(logs)
            idle = time.time() - progress
            is_known = progress <= self._examined_progress
            if idle >= STOPPED_SECONDS and not is_known and find_pending(logs, time.time()):
                self._report("stop", idle, logs)

    def _run(self) -> None:
        while True:
            self._watch_new()
            for descriptor, _ in self._poller.poll(INTERVAL_SECONDS * 1000):
                if descriptor == self._wake:
                    return
                self._note_end(descriptor)
            with self._lock:
                self._examine_deaths()
                self._examine_hang()

    # Ends of processes

    def _watch_new(self) -> None:
        for path in self._folder.path.glob("process-*.jsonl"):
            process = int(path.stem.rpartition("-")[2])
            if process in self._known:
                continue
            self._known.add(process)
            if not self._is_stopping:
                # A launcher started the ranks again: a rank may fail again.
                self._has_failure = False
            # Of a process that has ended already, its own record says how.
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(process)
                self._watched[descriptor] = process
                self._poller.register(descriptor, select.POLLIN)

    def _note_end(self, descriptor: int) -> None:
        if descriptor not in self._watched:
            return
        process = self._watched.pop(descriptor)
        self._poller.unregister(descriptor)
        os.close(descriptor)
        self._ended[process] = _End(time.time(), _how_it_ended(process))
        self._has_new_ends = True

    def _examine_deaths(self) -> None:
        """Report the first rank that ended by an exception or a signal."""
        if not self._has_new_ends or self._has_failure or self._is_stopping:
            return
        self._has_new_ends = False
        failed = {
            rank: moment
            for rank, known in self._ranks().items()
            if (moment := self._failure_time(known)) is not None
        }
        if failed:
            self._has_failure = True
            logs = self._logs()
            idle = time.time() - self._last_progress(logs)
            self._report("death", idle, logs, min(failed, key=failed.__getitem__))

    def _failure_time(self, known: ProcessRecord) -> float | None:
        """When a process failed; None if it runs or ended as it should."""
        end = self._ended.get(known.process)
        if end is None:
            return None
        if known.exception is not None:
            return known.ended
        is_clean = known.ended is not None or end.text == CLEAN_EXIT
        return None if is_clean else end.time

    # Hangs

    def _examine_hang(self) -> None:
        now = time.time()
        if not self._hang_seconds or now < self._next_check:
            return
        self._next_check = now + min(1.0, self._hang_seconds / 4)
        steps = self._last_step()
        if now - steps < self._hang_seconds:
            return
        # Logs may be large: not each second while nothing changes.
        self._next_check = now + self._hang_seconds / 4
        ranks = self._ranks()
        # After the last step to measure, a rank writes nothing more.
        if any(known.is_done for known in ranks.values()):
            return
        logs = self._logs()
        progress = max(steps, last_progress(list(logs.values())))
        if now - progress < self._hang_seconds or progress <= self._examined_progress:
            return
        # Preparations before the first step, and what follows the last one, may take long.
        if find_pending(logs, now) or (steps and self._is_any_running(ranks)):
            self._examined_progress = progress
            self._report("hang", now - progress, logs)

    def _is_any_running(self, ranks: dict[int, ProcessRecord]) -> bool:
        return any(
            known.ended is None and known.process not in self._ended for known in ranks.values()
        )

    def _last_step(self) -> float:
        """When a rank last wrote steps; 0 if none did."""
        times = []
        for path in self._folder.path.glob("events-*.jsonl"):
            with contextlib.suppress(FileNotFoundError):
                times.append(path.stat().st_mtime)
        return max(times, default=0.0)

    def _last_progress(self, logs: dict[int, RankCollectives]) -> float:
        progress = max(self._last_step(), last_progress(list(logs.values())))
        return progress or time.time()

    # Reports

    def _logs(self) -> dict[int, RankCollectives]:
        """Of the last start of the ranks."""
        *_, logs = {}, *read_logs(self._folder.path)
        return logs

    def _ranks(self) -> dict[int, ProcessRecord]:
        """The process of each rank.

        A rank that has not trained yet is known by its environment. Programs that it starts have
        the same, but begin later.
        """
        processes = {record.process: record for record in read_processes(self._folder.path)}
        ranks: dict[int, ProcessRecord] = {}
        for one in sorted(processes.values(), key=lambda record: record.began):
            if one.rank is not None:
                ranks.setdefault(one.rank, one)
        files = sorted(self._folder.path.glob("collectives-*.jsonl"), key=_attempt)
        for path in [*self._folder.path.glob("events-*.jsonl"), *files]:
            # The first line says which process writes the file.
            first = next(read_lines(path), {})
            if first.get("process") in processes:
                ranks[int(first["rank"])] = processes[first["process"]]
        return dict(sorted(ranks.items()))

    def _report(
        self,
        event: str,
        idle: float,
        logs: dict[int, RankCollectives],
        first: int | None = None,
    ) -> None:
        now = time.time()
        pending = find_pending(logs, now)
        states = []
        for rank, known in self._ranks().items():
            has_ended = known.ended is not None or known.process in self._ended
            state = RankState(rank, known.process, exception=known.exception)
            if has_ended:
                end = self._ended.get(known.process)
                state.ended = end.text if end else "exited"
                state.stack = known.exception_stack
            else:
                state.stack = request_stack(self._folder.path, known)
                state.pending = pending.get(rank)
            states.append(state)
        found = PostMortem(event, now, idle, states, first, find_mismatches(logs))
        self.reports.append(found.to_record())
        # Now, because this process may be killed, too.
        write_json(self._folder.path / POST_MORTEM_FILE, {"reports": self.reports})
        self._on_report(self.reports[-1])


def _attempt(path: Path) -> int:
    """The number of the start of a rank, from `collectives-<rank>-<start>.jsonl`."""
    return int(path.stem.rpartition("-")[2])


def _how_it_ended(process: int) -> str:
    """From the state of a process that its parent has not waited for yet."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        code = int(fields[-1])
    except (OSError, ValueError, IndexError):
        return "ended"
    if fields[0] not in "ZX":
        return "ended"
    if code & 0x7F:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code & 0x7F).name}"
        return f"killed by signal {code & 0x7F}"
    return f"exited with code {code >> 8}"
