"""Heartbeats between workers and parameter servers, which distinguish slow from lost peers.

The time until a reply does not show whether a peer is alive: a server may run a long update or wait
for the slowest worker, and a worker may evaluate for a long time. Each worker therefore has a
second connection to each server. On it, a background thread on each side sends a byte several times
per timeout. Training steps send no additional messages.

A peer that sends nothing for `--timeout-seconds` is lost: its process is stopped (SIGSTOP), one of
its threads blocks all others, or the network is down. A process that exits is detected earlier,
because its connections close. A process that runs but never replies counts as slow.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread
from time import monotonic
from typing import Self

from paceline.errors import error_line

BEATS_PER_TIMEOUT = 5
MAX_INTERVAL_SECONDS = 5.0
MAX_SILENT_INTERVALS = 2
"""The maximum number of intervals that one check counts as silence."""

BEAT, GOODBYE = b"\x00", b"\x01"


class SilenceTimer:
    """Measures how long a peer has sent nothing while this process was running.

    A process that was stopped must not count that time as silence of its peers, because it checks
    the clock before it reads the data that they sent.
    """

    def __init__(self, limit_seconds: float, interval_seconds: float, now: float) -> None:
        self._limit = limit_seconds
        self._max_increment = MAX_SILENT_INTERVALS * interval_seconds
        self._checked = now
        self._silent = 0.0

    def reset(self) -> None:
        """Restart the timer after the peer has sent data."""
        self._silent = 0.0

    def has_expired(self, now: float) -> bool:
        """Return whether the peer is lost; call it once per interval."""
        self._silent += min(now - self._checked, self._max_increment)
        self._checked = now
        return self._silent >= self._limit


@dataclass(slots=True)
class _PeerConnection:
    """The heartbeat connection to one peer."""

    connection: socket.socket
    silence: SilenceTimer
    number: int
    is_open: bool = True


class Heartbeats:
    """All heartbeat connections of one process, served by one thread."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next_beat = clock()
        self._timeout_seconds = timeout_seconds
        self._interval = min(timeout_seconds / BEATS_PER_TIMEOUT, MAX_INTERVAL_SECONDS)
        self._peers: list[_PeerConnection] = []
        self._lost: set[int] = set()
        self._when_lost: dict[int, Callable[[], None]] = {}
        self._lock = Lock()
        self._selector = selectors.DefaultSelector()
        self._waker, self._wake = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._is_closing = False
        self._thread = Thread(target=self._run, name="paceline-heartbeats", daemon=True)

    def add(self, connection: socket.socket, number: int) -> None:
        """Add a connection to a peer, which callbacks identify by `number`. Call before `start`."""
        connection.setblocking(False)
        silence = SilenceTimer(self._timeout_seconds, self._interval, self._clock())
        peer = _PeerConnection(connection, silence, number)
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def start(self) -> None:
        self._thread.start()

    def when_lost(self, number: int, action: Callable[[], None]) -> None:
        """Register a function that the heartbeat thread calls when the peer is lost."""
        with self._lock:
            self._when_lost[number] = action
            is_lost = number in self._lost
        if is_lost:
            action()

    def close(self) -> None:
        """Tell all peers that heartbeats end, and disconnect."""
        self._is_closing = True
        self._waker.send(BEAT)
        if self._thread.ident is not None:
            self._thread.join()
        self._send(GOODBYE)
        for peer in self._peers:
            peer.connection.close()
        self._selector.close()
        self._waker.close()
        self._wake.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closing:
            self.run_once()

    def run_once(self) -> None:
        """Wait for data or the time of the next heartbeat, and handle it.

        The background thread calls this in a loop.
        """
        for key, _ in self._selector.select(max(0.0, self._next_beat - self._clock())):
            if isinstance(key.data, _PeerConnection):
                self._read(key.data)
        if self._clock() >= self._next_beat:
            self._send(BEAT)
            self._check_peers()
            self._next_beat = self._clock() + self._interval

    def _read(self, peer: _PeerConnection) -> None:
        try:
            data = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.silence.reset()
        if not data:
            self._handle_close(peer)
            return
        if GOODBYE in data:
            self._remove(peer)

    def _handle_close(self, peer: _PeerConnection) -> None:
        """Handle a connection that the peer has closed.

        If its process has exited, the closed data connection reports the error. Otherwise the peer
        is lost after the timeout.
        """
        self._selector.unregister(peer.connection)
        peer.is_open = False

    def _remove(self, peer: _PeerConnection) -> None:
        if peer.is_open:
            self._selector.unregister(peer.connection)
        peer.connection.close()
        self._peers.remove(peer)

    def _send(self, message: bytes) -> None:
        for peer in self._peers:
            if peer.is_open:
                # If sending fails, the peer detects missing heartbeats.
                with contextlib.suppress(OSError):
                    peer.connection.send(message)

    def _check_peers(self) -> None:
        now = self._clock()
        silent = [peer for peer in self._peers if peer.silence.has_expired(now)]
        for peer in silent:
            self._remove(peer)
            with self._lock:
                self._lost.add(peer.number)
                action = self._when_lost.get(peer.number)
            if action is not None:
                self._notify(action)

    def _notify(self, action: Callable[[], None]) -> None:
        """Call `action`; its errors must not stop the heartbeats of other peers."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the thread must continue
            sys.stderr.write(f"heartbeats: handling a lost peer failed: {error_line(error)}\n")
