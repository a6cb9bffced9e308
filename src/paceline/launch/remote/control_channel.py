"""The protocol between a launcher and its process on another machine, both ends.

The first line of the process's standard input is a `NodeTask`. After that the launcher sends a
heartbeat every few seconds, or the name of a signal to forward. When the input ends or falls
silent, the launcher or the connection is gone, and the process ends with all that it has started.
Lines of its standard error are errors, status messages for the launcher, or output for the user.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import IO, Any

from paceline import __version__
from paceline.errors import ERROR_PREFIX, PacelineError, UsageError
from paceline.launch.fork_server import ChildProcess
from paceline.launch.signals import SIGNALS

STATUS_MARK = "\x1e"
"""Starts the lines of standard error that are for the launcher and not for the user."""
HEARTBEAT_SECONDS = 2.0
"""How often the launcher sends a heartbeat."""
SILENCE_SECONDS = 20.0
"""Without a heartbeat for this long, the connection is lost; machines may be overloaded."""
LAST_ITERATION_SECONDS = 5.0
"""Time for workers to agree on a last iteration when the launcher is gone."""
CLEARING_SECONDS = 3.0
"""Time for this node's launcher to end its workers after that."""

EXIT_POLL_SECONDS = 0.0005

_INPUT = 0


def read_request() -> dict[str, Any]:
    """The first line of standard input, a JSON object; empty at the end of the input."""
    # Byte by byte, because the following lines are read elsewhere.
    line = bytearray()
    while (byte := os.read(_INPUT, 1)) not in (b"", b"\n"):
        line += byte
    value = json.loads(line) if line else {}
    if not isinstance(value, dict):
        raise ValueError("the first line of the input is not an object")
    return value


TRAIN = "train"


@dataclass(frozen=True, slots=True)
class NodeTask:
    """What the launcher wants a node to do."""

    version: str
    """The launcher's version of paceline."""
    program: str
    """TRAIN, or a module whose `run_task` gets the task."""
    config: dict[str, Any]
    """The configuration of the program on this node."""
    is_resumed: bool
    quiet: bool
    terminal_columns: int | None
    """Width of the terminal that shows the output of node 0; None without one."""

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls) -> NodeTask:
        values = read_request()
        theirs = values.get("version")
        if theirs != __version__:
            raise UsageError(
                f"has paceline {__version__}, but the launcher has {theirs}: install the"
                " same version on all machines"
            )
        return cls(**values)


def send_status(**values: Any) -> None:
    """Send values to the launcher that the user does not see."""
    sys.stderr.write(f"{STATUS_MARK}{json.dumps(values)}\n")
    sys.stderr.flush()


def report_errors(action: Callable[[], object]) -> int:
    """Run an action; returns 0, or the exit code of an error, which is printed."""
    try:
        action()
    except PacelineError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{ERROR_PREFIX}{line}\n")
        sys.stderr.flush()
        return error.exit_code
    return 0


class LauncherWatch:
    """A thread that forwards the launcher's signals, and ends this process soon after it."""

    def __init__(self) -> None:
        self.resume()

    def resume(self) -> None:
        self._paused, self._pause = os.pipe()
        self._thread = Thread(target=_watch, args=[self._paused], name="launcher", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Run a block without the thread, in a process that must not have any."""
        os.close(self._pause)
        self._thread.join()
        while Path(f"/proc/self/task/{self._thread.native_id}").exists():
            sleep(EXIT_POLL_SECONDS)
        os.close(self._paused)
        yield
        self.resume()


def _watch(paused: int) -> None:
    while ready := select.select([_INPUT, paused], [], [], SILENCE_SECONDS)[0]:
        if paused in ready:
            return
        received = os.read(_INPUT, 4096)
        if not received:
            break
        for word in received.decode(errors="replace").split():
            for number in SIGNALS:
                if word == number.name:
                    os.kill(os.getpid(), number)
    # The first signal lets workers finish their iteration, the second one kills them.
    for seconds in (LAST_ITERATION_SECONDS, CLEARING_SECONDS):
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(seconds)
    # Its children are tied to this process and end as well.
    os.kill(os.getpid(), signal.SIGKILL)


DRAIN_SECONDS = 1.0
"""How long to read the output of a process that has ended; others may hold its pipes open."""
LATEST_SECONDS = 0.5
"""How long a line of standard error is held back, in case the process fails with it."""
READ_BYTES = 1 << 16


@dataclass(slots=True)
class NodeExit:
    """What is known about the process on a node and how it ended."""

    node: int
    code: int | None = None
    error_message: str = ""
    """The error that it reported."""
    last_line: str = ""
    """The last line of its other standard error."""
    has_started: bool = False
    """Whether it wrote output or a status."""
    status: dict[str, Any] = field(default_factory=dict)
    """What it sent with `send_status`."""
    ended: float = 0.0
    """By the monotonic clock."""


def popen_piped(
    argv: Sequence[str], request: bytes, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process with three pipes and write `request` to its input, which stays open."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # Ctrl-C reaches the whole foreground group; the supervisor forwards it.
        start_new_session=True,
    )
    send_request(process, request)
    return process


def send_request(process: ChildProcess, request: bytes) -> None:
    """Write the first line of the input of a process."""
    assert process.stdin is not None
    # A process that ended at once reports why by other means.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.flush()


class NodeProcess:
    """The process on a node: shows its output and keeps its errors."""

    def __init__(self, node: int, process: ChildProcess, prefix: str) -> None:
        self.end = NodeExit(node)
        self._process = process
        self._prefix = prefix
        """Printed before each line."""
        # A live line has no end. Without one, whole lines keep the output of nodes apart.
        self._is_live = not prefix and sys.stdout.isatty()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._out, self._err = b"", b""
        """Incomplete lines."""
        self._held: list[str] = []
        """Standard error before the process started: why it was not reached."""
        self._latest: tuple[str, float] | None = None
        """The latest line of standard error and its time; if the process then fails without an
        error, the line is its cause and is not shown."""
        self._open: set[int] = set()
        self._exited: float | None = None
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)

    @property
    def is_running(self) -> bool:
        return self.end.code is None

    def register(self, selector: selectors.BaseSelector) -> None:
        for pipe, take in (
            (self._process.stdout, self._take_out),
            (self._process.stderr, self._take_err),
        ):
            assert pipe is not None
            self._open.add(pipe.fileno())
            selector.register(pipe, selectors.EVENT_READ, self._reader(pipe, take))

    def _reader(
        self, pipe: IO[bytes], take: Callable[[bytes], None]
    ) -> Callable[[selectors.BaseSelector], None]:
        def read(selector: selectors.BaseSelector) -> None:
            received = os.read(pipe.fileno(), READ_BYTES)
            take(received)
            if not received:
                selector.unregister(pipe)
                self._open.discard(pipe.fileno())

        return read

    def poll(self, selector: selectors.BaseSelector) -> None:
        """Check whether the process has ended and its output is complete."""
        if not self.is_running:
            return
        code = self._process.poll()
        if code is None:
            if self._latest and monotonic() - self._latest[1] > LATEST_SECONDS:
                self._show_latest()
            return
        self._exited = self._exited or monotonic()
        if self._open and monotonic() - self._exited < DRAIN_SECONDS:
            return
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and pipe.fileno() in self._open:
                selector.unregister(pipe)
        self._take_out(b"\n" if self._out else b"")
        self._take_err(b"\n" if self._err else b"")
        self.end.code, self.end.ended = code, self._exited
        if code == 0:
            self._mark_started()
        if code == 0 or self.end.error_message:
            self._show_latest()
        self.close()

    def send(self, data: bytes) -> None:
        """Write to its input; data that the pipe does not accept is dropped."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                os.write(stdin.fileno(), data)

    def close_stdin(self) -> None:
        """Tell the process to end, by closing its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _take_out(self, received: bytes) -> None:
        if received:
            self._mark_started()
        if self._is_live:
            sys.stdout.write(self._decode(received))
            sys.stdout.flush()
            return
        *lines, self._out = (self._out + received).split(b"\n")
        for line in lines:
            self._show(line.decode(errors="replace"), sys.stdout.write)
        sys.stdout.flush()

    def _take_err(self, received: bytes) -> None:
        *lines, self._err = (self._err + received).split(b"\n")
        for line in lines:
            self._take_line(line.decode(errors="replace").rstrip("\r"))

    def _take_line(self, line: str) -> None:
        if line.startswith(STATUS_MARK):
            self._mark_started()
            with contextlib.suppress(ValueError, RecursionError):
                status = json.loads(line.removeprefix(STATUS_MARK))
                self.end.status |= status if isinstance(status, dict) else {}
        elif line.startswith(ERROR_PREFIX):
            text = line.removeprefix(ERROR_PREFIX)
            self.end.error_message = "\n".join(filter(None, (self.end.error_message, text)))
        else:
            self.end.last_line = line.strip() or self.end.last_line
            self._show_latest()
            self._latest = line, monotonic()

    def _show_latest(self) -> None:
        if self._latest is None:
            return
        if self.end.has_started:
            self._show(self._latest[0], sys.stderr.write)
        else:
            self._held.append(self._latest[0])
        self._latest = None

    def _mark_started(self) -> None:
        self.end.has_started = True
        for line in self._held:
            self._show(line, sys.stderr.write)
        self._held.clear()

    def _show(self, line: str, write: Callable[[str], Any]) -> None:
        # Clear node 0's live line, which it draws again.
        clear = "\r\x1b[2K" if self._prefix and sys.stdout.isatty() else ""
        write(f"{clear}{self._prefix}{line}\n")
