"""Heartbeats distinguish lost peers from slow ones and from those that have left."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Iterator
from threading import Event

import pytest

from paceline.strategies.parameter_server.heartbeat import Address, Heartbeats, SilenceTimer

LIMIT_SECONDS = 30.0
"""Timeout for events that must occur, generous for a busy machine."""


def looks(silence: SilenceTimer, times: list[float]) -> list[bool]:
    return [silence.has_expired(now) for now in times]


def test_peer_is_lost_after_the_timeout_without_a_heartbeat() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=100.0)
    assert looks(silence, [101.0, 102.0, 103.0, 104.0]) == [False] * 4
    assert silence.has_expired(105.0)


def test_heartbeat_resets_the_timeout() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
    assert looks(silence, [1.0, 2.0, 3.0, 4.0]) == [False] * 4
    silence.reset()
    assert looks(silence, [5.0, 6.0, 7.0, 8.0, 9.0]) == [False] * 4 + [True]


def test_time_while_this_process_was_suspended_does_not_count() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
    assert looks(silence, [1.0, 1000.0]) == [False, False]
    assert looks(silence, [1001.0, 1002.0]) == [False, True]


@pytest.fixture
def server() -> Iterator[tuple[Heartbeats, Address, Event]]:
    """A server that reports the loss of peer 3."""
    lost = Event()
    with Heartbeats(timeout_seconds=1.0) as heartbeats:
        address = heartbeats.listen("127.0.0.1")
        heartbeats.when_lost(3, lost.set)
        heartbeats.start()
        yield heartbeats, address, lost


def hello(address: Address, token: str | None = None) -> socket.socket:
    """A peer that identifies itself and sends no heartbeats on its own."""
    connection = socket.create_connection((address.host, address.port), LIMIT_SECONDS)
    connection.sendall(bytes.fromhex(token or address.token) + (3).to_bytes(4, "big"))
    return connection


Server = tuple[Heartbeats, Address, Event]


def test_connected_but_silent_peer_is_lost(server: Server) -> None:
    _, address, lost = server
    with hello(address):
        assert lost.wait(LIMIT_SECONDS)


def test_peer_receives_heartbeats_beyond_the_timeout(server: Server) -> None:
    """The peer is not lost while it sends heartbeats, too."""
    _, address, lost = server
    with hello(address) as connection:
        for _ in range(10):
            assert connection.recv(1) == b"\x00"
            connection.sendall(b"\x00")
    assert not lost.is_set()


def test_peer_that_says_goodbye_is_not_lost(server: Server) -> None:
    _, address, lost = server
    with hello(address) as connection:
        connection.sendall(b"\x01")
        assert not lost.wait(3.0)


def test_connection_closed_without_goodbye_counts_as_silence(server: Server) -> None:
    _, address, lost = server
    hello(address).close()
    assert lost.wait(LIMIT_SECONDS)


def test_unknown_peer_is_disconnected(server: Server) -> None:
    _, address, lost = server
    with hello(address, token="00" * 16) as connection:
        assert connection.recv(1) == b""
    assert not lost.is_set()


class Ends:
    """A server and a worker on one clock that send heartbeats only on request of the test."""

    def __init__(self, server: Heartbeats, worker: Heartbeats) -> None:
        self.server, self.worker = server, worker
        self.lost_by: list[str] = []


@pytest.fixture
def clock() -> list[float]:
    """The time that the test sets."""
    return [100.0]


@pytest.fixture
def ends(clock: list[float]) -> Iterator[Ends]:
    now = lambda: clock[0]  # noqa: E731
    with Heartbeats(5.0, now) as server, Heartbeats(5.0, now) as worker:
        ends = Ends(server, worker)
        server.when_lost(3, lambda: ends.lost_by.append("server"))
        worker.when_lost(0, lambda: ends.lost_by.append("worker"))
        worker.connect(server.listen("127.0.0.1"), 3, number=0, limit_seconds=LIMIT_SECONDS)
        while not any(peer.number == 3 for peer in server._peers):
            server.run_once()
        yield ends


def test_two_running_processes_do_not_lose_each_other(clock: list[float], ends: Ends) -> None:
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
        ends.worker.run_once()
    assert ends.lost_by == []


def test_suspended_process_is_lost(clock: list[float], ends: Ends) -> None:
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
    assert ends.lost_by == ["server"]


def test_error_in_a_loss_callback_does_not_stop_the_heartbeats(
    clock: list[float], ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise AttributeError("gone")

    ends.server.when_lost(3, fail)
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
    assert "heartbeats: handling a lost peer failed" in capsys.readouterr().err


class NoFilesLeft:
    """A listener whose `accept` fails while too many files are open."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.accepts = 0

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        self.accepts += 1
        raise OSError(errno.EMFILE, "too many open files")

    def close(self) -> None:
        self._listener.close()


def test_accept_is_retried_at_the_next_heartbeat_after_too_many_open_files(
    clock: list[float],
) -> None:
    with Heartbeats(5.0, lambda: clock[0]) as server:
        address = server.listen("127.0.0.1")
        server.run_once()
        listener = server._listener
        assert listener is not None
        full = NoFilesLeft(listener)
        server._selector.unregister(listener)
        server._listener = full  # type: ignore[assignment]  # has the methods that are used
        server._selector.register(full, selectors.EVENT_READ)
        with hello(address):
            server.run_once()
            clock[0] += 0.999
            server.run_once()
            assert full.accepts == 1
            clock[0] += 0.001
            server.run_once()
            server.run_once()
            assert full.accepts == 2


def test_earlier_loss_is_reported_on_registration(server: Server) -> None:
    heartbeats, address, lost = server
    late = Event()
    with hello(address):
        assert lost.wait(LIMIT_SECONDS)
        heartbeats.when_lost(3, late.set)
    assert late.is_set()
