"""Heartbeats between workers and parameter servers: a peer that is slow is not dead.

How long an answer takes says nothing about the peer: a server may be busy with an update, or may
wait for the slowest worker, and a worker may evaluate for a long time. So every worker has a second
connection with every server, on which both sides send a byte a few times per timeout, from a thread
of their own. No message is added to a training step.

A peer from which nothing arrives for `--timeout-seconds` is lost. Its process is stopped (SIGSTOP),
or does not let any of its threads run, or the network between the two is down. A process that ends
is noticed sooner, since its connections close. A process that runs but never answers is slow.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread
from time import monotonic
from typing import Self

from paceline.errors import error_line

BEATS_PER_TIMEOUT = 5
LONGEST_INTERVAL_SECONDS = 5.0
LONGEST_STEP = 2
"""In intervals: how much silence one look can add."""

BEAT, GOODBYE = b"\x00", b"\x01"

TOKEN_BYTES = 16
_NUMBER = struct.Struct("!I")
_HELLO_BYTES = TOKEN_BYTES + _NUMBER.size


class Silence:
    """For how long a peer was not heard, as far as this process was awake to listen.

    A process that was stopped or starved itself must not blame its peers when it runs again: what
    they sent in the meantime arrives only after it has looked at the clock.
    """

    def __init__(self, limit_seconds: float, interval_seconds: float, now: float) -> None:
        self._limit = limit_seconds
        self._longest_step = LONGEST_STEP * interval_seconds
        self._looked = now
        self._silent = 0.0

    def heard(self) -> None:
        self._silent = 0.0

    def is_too_long(self, now: float) -> bool:
        """To be asked about once per interval."""
        self._silent += min(now - self._looked, self._longest_step)
        self._looked = now
        return self._silent >= self._limit


@dataclass(slots=True)
class _Line:
    """A connection with one peer."""

    connection: socket.socket
    silence: Silence
    number: int | None = None
    """Of the peer; None until it has said who it is."""
    hello: bytes = b""
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens for heartbeats; the token keeps strangers out."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def decode(cls, text: str) -> Self:
        host, port, token = text.split()
        return cls(host, int(port), token)


class Heartbeats:
    """One process's end of its heartbeat connections, served by one thread."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next_beat = clock()
        self._timeout_seconds = timeout_seconds
        self._interval = min(timeout_seconds / BEATS_PER_TIMEOUT, LONGEST_INTERVAL_SECONDS)
        self._lines: list[_Line] = []
        self._lost: set[int] = set()
        self._when_lost: dict[int, Callable[[], None]] = {}
        self._lock = Lock()
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._is_listening = False
        self._token = b""
        self._is_closing = False
        self._thread = Thread(target=self._run, name="paceline-heartbeats", daemon=True)

    def listen(self, host: str) -> Address:
        """Accept the heartbeats of peers that know the address returned. Call before `start`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        self._resume_listening()
        self._token = secrets.token_bytes(TOKEN_BYTES)
        return Address(host, int(self._listener.getsockname()[1]), self._token.hex())

    def connect(self, address: Address, own_number: int, number: int, limit_seconds: float) -> None:
        """Exchange heartbeats with a peer, known here as `number`. Call before `start`."""
        connection = socket.create_connection((address.host, address.port), limit_seconds)
        connection.sendall(bytes.fromhex(address.token) + _NUMBER.pack(own_number))
        self._add(connection, number)

    def start(self) -> None:
        self._thread.start()

    def when_lost(self, number: int, action: Callable[[], None]) -> None:
        """Call this, from the thread of the heartbeats, when the peer is lost."""
        with self._lock:
            self._when_lost[number] = action
            is_lost = number in self._lost
        if is_lost:
            action()

    def close(self) -> None:
        """Let the peers know that the silence to come means nothing, and disconnect."""
        self._is_closing = True
        self._waker.send(BEAT)
        if self._thread.ident is not None:
            self._thread.join()
        self._send(GOODBYE)
        for line in self._lines:
            line.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._waker.close()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, connection: socket.socket, number: int | None) -> None:
        connection.setblocking(False)
        silence = Silence(self._timeout_seconds, self._interval, self._clock())
        line = _Line(connection, silence, number)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _run(self) -> None:
        while not self._is_closing:
            self.run_once()

    def run_once(self) -> None:
        """Read what arrives until something does or a beat is due, and send the beat if it is.

        The thread of `start` repeats this.
        """
        for key, _ in self._selector.select(max(0.0, self._next_beat - self._clock())):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.data, _Line):
                self._read(key.data)
        if self._clock() >= self._next_beat:
            self._resume_listening()
            self._send(BEAT)
            self._look()
            self._next_beat = self._clock() + self._interval

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Such as too many open files: until the next beat, since `select` would return at once.
            self._selector.unregister(self._listener)
            self._is_listening = False
            return
        self._add(connection, None)

    def _resume_listening(self) -> None:
        if self._listener is not None and not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_listening = True

    def _read(self, line: _Line) -> None:
        try:
            data = line.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        line.silence.heard()
        if not data:
            self._hang_up(line)
            return
        if line.number is None:
            line.hello += data
            data = line.hello[_HELLO_BYTES:]
            if not secrets.compare_digest(line.hello[:TOKEN_BYTES], self._token[: len(line.hello)]):
                self._forget(line)
                return
            if len(line.hello) >= _HELLO_BYTES:
                (line.number,) = _NUMBER.unpack(line.hello[TOKEN_BYTES:_HELLO_BYTES])
        if GOODBYE in data:
            self._forget(line)

    def _hang_up(self, line: _Line) -> None:
        """The peer has closed the connection. If its process has ended, the data connection is
        closed as well and is noticed at once; if not, its silence counts from now."""
        if line.number is None:
            self._forget(line)
        else:
            self._selector.unregister(line.connection)
            line.is_open = False

    def _forget(self, line: _Line) -> None:
        if line.is_open:
            self._selector.unregister(line.connection)
        line.connection.close()
        self._lines.remove(line)

    def _send(self, message: bytes) -> None:
        for line in self._lines:
            if line.number is not None and line.is_open:
                # If a beat cannot be sent, the peer notices the silence.
                with contextlib.suppress(OSError):
                    line.connection.send(message)

    def _look(self) -> None:
        now = self._clock()
        silent = [line for line in self._lines if line.silence.is_too_long(now)]
        for line in silent:
            self._forget(line)
            if line.number is None:
                continue
            with self._lock:
                self._lost.add(line.number)
                action = self._when_lost.get(line.number)
            if action is not None:
                self._act(action)

    def _act(self, action: Callable[[], None]) -> None:
        """An error in it must not end the heartbeats with all other peers."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread
            sys.stderr.write(f"heartbeats: handling a lost peer failed: {error_line(error)}\n")
