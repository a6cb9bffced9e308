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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from time import monotonic, sleep
from typing import IO, Any

from paceline import __version__
from paceline.errors import ERROR_PREFIX, PacelineError, UsageError
from paceline.launch.signals import SIGNALS

STATUS_MARK = "\x1e"
"""Begins the lines of standard error that are for the starter and not for the user."""
HEARTBEAT_SECONDS = 2.0
"""How often the starter sends a sign of life."""
SILENCE_SECONDS = 20.0
"""Without any, the connection is held to be cut; many beats, since machines may be overloaded."""
LAST_ITERATION_SECONDS = 5.0
"""What workers get to agree on a last iteration when the starter is gone."""
CLEARING_SECONDS = 3.0
"""What a launcher gets to end its workers after that."""

_INPUT = 0


def read_given() -> dict[str, Any]:
    """The first line of standard input, an object of JSON; empty where nothing came."""
    # Byte by byte: what follows the line belongs to whoever reads on.
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
        values = read_given()
        theirs = values.get("version")
        if theirs != __version__:
            raise UsageError(
                f"has paceline {__version__}, and the command that starts it {theirs}: install the"
                " same version on all machines"
            )
        return cls(**values)


def send_status(**news: Any) -> None:
    """Let the starter know something that the user need not see."""
    sys.stderr.write(f"{STATUS_MARK}{json.dumps(news)}\n")
    sys.stderr.flush()


def report_errors(action: Callable[[], object]) -> int:
    """Do something; returns 0, or the exit code of an error, which is told as commands do."""
    try:
        action()
    except PacelineError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{ERROR_PREFIX}{line}\n")
        sys.stderr.flush()
        return error.exit_code
    return 0


def exit_with_launcher() -> None:
    """From now on, pass on the starter's signals, and end soon after it."""
    Thread(target=_watch, name="starter", daemon=True).start()


def _watch() -> None:
    while select.select([_INPUT], [], [], SILENCE_SECONDS)[0]:
        received = os.read(_INPUT, 4096)
        if not received:
            break
        for word in received.decode(errors="replace").split():
            for number in SIGNALS:
                if word == number.name:
                    os.kill(os.getpid(), number)
    # A first signal lets workers finish their iteration, a second one ends them at once.
    for seconds in (LAST_ITERATION_SECONDS, CLEARING_SECONDS):
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(seconds)
    # Whatever still holds this process up, its children are tied to it and end as well.
    os.kill(os.getpid(), signal.SIGKILL)


DRAIN_SECONDS = 1.0
"""How long to wait for the last words of a process that has ended, whose pipes others may hold."""
LATEST_SECONDS = 0.5
"""How long a line of standard error is kept back in case that the process ends with it."""
READ_BYTES = 1 << 16


@dataclass(slots=True)
class NodeExit:
    """How a node's process ended, as far as it has."""

    node: int
    code: int | None = None
    complaint: str = ""
    """The error that it told."""
    last_line: str = ""
    """Of what else it said on standard error."""
    has_started: bool = False
    """Whether it gave a sign of being there."""
    news: dict[str, Any] = field(default_factory=dict)
    """What it told its starter (launch/remote/control_channel.py)."""
    ended: float = 0.0


def popen_piped(
    words: Sequence[str], given: bytes, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process as fleets start it: pipes on all sides, `given` on its way, the input left open."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # Ctrl-C reaches the whole foreground group; whoever watches over the nodes passes it on.
        start_new_session=True,
    )
    assert process.stdin is not None
    # One that ended at once says why in another way.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(given)
        process.stdin.flush()
    return process


class NodeProcess:
    """Shows what a process says, all but its complaints, which it keeps."""

    def __init__(self, node: int, process: subprocess.Popen[bytes], prefix: str) -> None:
        self.end = NodeExit(node)
        self._process = process
        self._prefix = prefix
        """Before each of its lines."""
        # A live line has no end; elsewhere whole lines are kept apart from those of others.
        self._is_live = not prefix and sys.stdout.isatty()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._out, self._err = b"", b""
        """Lines that have begun."""
        self._held: list[str] = []
        """What came on standard error before any sign of the process: how it was not reached."""
        self._latest: tuple[str, float] | None = None
        """A line of standard error and when it came; if it was the last one of a process that
        failed without a word, it is told as the cause instead."""
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

    def look(self, selector: selectors.BaseSelector) -> None:
        """Note the end, once the last words have come."""
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
            self._begin()
        if code == 0 or self.end.complaint:
            self._show_latest()
        self.close()

    def send(self, words: bytes) -> None:
        """To its input; what does not get through, a later sign of life may."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                os.write(stdin.fileno(), words)

    def close_stdin(self) -> None:
        """Tell the process that it is to end, by termination its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Be done with it, whatever it is doing."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _take_out(self, received: bytes) -> None:
        if received:
            self._begin()
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
            self._hear(line.decode(errors="replace").rstrip("\r"))

    def _hear(self, line: str) -> None:
        if line.startswith(STATUS_MARK):
            self._begin()
            with contextlib.suppress(ValueError, RecursionError):
                news = json.loads(line.removeprefix(STATUS_MARK))
                self.end.news |= news if isinstance(news, dict) else {}
        elif line.startswith(ERROR_PREFIX):
            told = line.removeprefix(ERROR_PREFIX)
            self.end.complaint = "\n".join(filter(None, (self.end.complaint, told)))
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

    def _begin(self) -> None:
        self.end.has_started = True
        for line in self._held:
            self._show(line, sys.stderr.write)
        self._held.clear()

    def _show(self, line: str, write: Callable[[str], Any]) -> None:
        # The first node may have a live line there, which it draws anew.
        clear = "\r\x1b[2K" if self._prefix and sys.stdout.isatty() else ""
        write(f"{clear}{self._prefix}{line}\n")
