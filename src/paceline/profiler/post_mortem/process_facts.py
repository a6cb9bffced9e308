"""What each profiled process leaves for a post-mortem, and how its stacks are read.

`process-<pid>.jsonl` says what the process is, and how it ended unless it was killed.
`stacks-<pid>.txt` receives the stacks of all its threads when another process sends it a signal.
faulthandler writes them in C, so a thread that is blocked, or that holds the GIL, does not matter,
and until then nothing is executed at all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import RunError, error_line
from paceline.records import EventWriter, read_lines

STACK_SIGNAL = signal.SIGRTMAX - 5
"""Hardly any program uses a real-time signal near the end of the range."""

STACK_SECONDS = 2.0
"""How long a process may take to write its stacks."""

PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
NOT_THE_SCRIPT = re.compile(r"/site-packages/|/dist-packages/|/lib(64)?/python\d|^<")
"""Files of installed packages and of Python."""


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def is_script(self) -> bool:
        """Whether it is code of the user."""
        return not (NOT_THE_SCRIPT.search(self.file) or self.file.startswith(PACKAGE))

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} in {self.function}"


Stack = tuple[Frame, ...]
"""Innermost frame first."""


# In the profiled process


class ProcessFacts:
    """Written from the start of the profiler to the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._process = process = os.getpid()
        self._is_closed = False
        self._events = EventWriter(folder / f"process-{process}.jsonl")
        self._stacks: TextIO | None = None
        taken = signal.getsignal(STACK_SIGNAL)
        if taken == signal.SIG_DFL:
            self._stacks = (folder / f"stacks-{process}.txt").open("a", encoding="utf-8")
            faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._events.write(
            "process",
            process=process,
            # A worker of a data loader has the environment of its rank.
            rank=None if parent_process() else os.environ.get("RANK"),
            main_thread=threading.main_thread().ident,
            answers=self._stacks is not None,
        )

    def stop(self) -> None:
        """Note that the process goes on, but is not measured any more."""
        with contextlib.suppress(OSError, RunError):
            self._events.write("stop")

    def close(self) -> None:
        """Note how the process ends; once, and not in a forked process."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        with contextlib.suppress(OSError, RunError):
            self._write_end()
        self.remove()

    def _write_end(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            self._events.write("exit")
        else:
            # Python has printed it already.
            frames = reversed(list(_frames_of(error)))
            self._events.write(
                "exception",
                text=error_line(error),
                stack=[[frame.file, frame.line, frame.function] for frame in frames],
            )

    def remove(self) -> None:
        self._events.close()
        if self._stacks is not None:
            faulthandler.unregister(STACK_SIGNAL)
            self._stacks.close()
            self._stacks = None


def _frames_of(error: BaseException) -> Iterator[Frame]:
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield Frame(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next


# In the process that watches it


@dataclass(slots=True)
class ProcessRecord:
    """What one process wrote."""

    process: int
    rank: int | None
    """Of the launcher's environment; None if it set none."""
    main_thread: int
    answers: bool
    """Whether it writes its stacks on request."""
    began: float = 0.0
    is_done: bool = False
    """Whether it runs, but is not measured any more."""
    ended: float | None = None
    """When the process ended by itself."""
    exception: str | None = None
    exception_stack: Stack = ()


def read_processes(folder: Path) -> list[ProcessRecord]:
    records = [_read(path) for path in folder.glob("process-*.jsonl")]
    return sorted(filter(None, records), key=lambda record: record.process)


def _read(path: Path) -> ProcessRecord | None:
    record: ProcessRecord | None = None
    for line in read_lines(path):
        match line.get("event"):
            case "process":
                rank = line["rank"]
                record = ProcessRecord(
                    line["process"],
                    int(rank) if rank is not None and str(rank).isdigit() else None,
                    line["main_thread"],
                    line["answers"],
                    line["time"],
                )
            case "stop" if record is not None:
                record.is_done = True
            case "exit" if record is not None:
                record.ended = line["time"]
            case "exception" if record is not None:
                record.ended, record.exception = line["time"], line["text"]
                record.exception_stack = tuple(Frame(*frame) for frame in line["stack"])
    return record


def request_stack(folder: Path, record: ProcessRecord) -> Stack:
    """Return the stack of a process's main thread; empty if it does not answer."""
    path = folder / f"stacks-{record.process}.txt"
    try:
        before = path.stat().st_size
        # The default action of the signal is to kill the process.
        if not (record.answers and _catches(record.process)):
            return ()
        os.kill(record.process, STACK_SIGNAL)
    except OSError:
        return ()
    stack: Stack = ()
    size, deadline = before, time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.02)
        grown = path.stat().st_size
        # The main thread is usually the last one, so the file must have stopped growing.
        if grown == size > before and stack:
            break
        size = grown
        text = path.read_bytes()[before:].decode(errors="replace")
        stack = parse_stacks(text).get(record.main_thread, ())
    return stack


def _catches(process: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{process}/status").read_text()
        mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        return mask is not None and bool(int(mask[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def parse_stacks(text: str) -> dict[int, Stack]:
    """The stack of each thread, by identifier, as faulthandler writes them."""
    stacks: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            current = stacks[int(thread[1], 16)] = []
        elif frame := _FRAME.match(line):
            current.append(Frame(frame[1], int(frame[2]), frame[3]))
    return {thread: tuple(frames) for thread, frames in stacks.items()}


def to_record(stack: Stack) -> list[dict[str, Any]]:
    return [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in stack]
