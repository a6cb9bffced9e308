"""Heartbeats tell a peer that is lost from one that is slow or has left."""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Iterator
from threading import Event

import pytest

from paceline.strategies.parameter_server.heartbeat import Address, Heartbeats, SilenceTimer

LIMIT_SECONDS = 30.0
"""For what must happen, on a machine that has other work as well."""


def looks(silence: SilenceTimer, times: list[float]) -> list[bool]:
    return [silence.has_expired(now) for now in times]


def test_a_peer_is_lost_after_the_limit_without_a_beat() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=100.0)
    assert looks(silence, [101.0, 102.0, 103.0, 104.0]) == [False] * 4
    assert silence.has_expired(105.0)


def test_a_beat_starts_the_silence_anew() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
    assert looks(silence, [1.0, 2.0, 3.0, 4.0]) == [False] * 4
    silence.reset()
    assert looks(silence, [5.0, 6.0, 7.0, 8.0, 9.0]) == [False] * 4 + [True]


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    silence = SilenceTimer(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
    assert looks(silence, [1.0, 1000.0]) == [False, False]
    assert looks(silence, [1001.0, 1002.0]) == [False, True]


@pytest.fixture
def server() -> Iterator[tuple[Heartbeats, Address, Event]]:
    """Listens, and says when peer 3 is lost."""
    lost = Event()
    with Heartbeats(timeout_seconds=1.0) as heartbeats:
        address = heartbeats.listen("127.0.0.1")
        heartbeats.when_lost(3, lost.set)
        heartbeats.start()
        yield heartbeats, address, lost


def hello(address: Address, token: str | None = None) -> socket.socket:
    """A peer that says who it is, and sends beats only when the test does."""
    connection = socket.create_connection((address.host, address.port), LIMIT_SECONDS)
    connection.sendall(bytes.fromhex(token or address.token) + (3).to_bytes(4, "big"))
    return connection


Server = tuple[Heartbeats, Address, Event]


def test_a_peer_that_stays_connected_but_silent_is_lost(server: Server) -> None:
    _, address, lost = server
    with hello(address):
        assert lost.wait(LIMIT_SECONDS)


def test_a_peer_gets_beats_for_longer_than_the_timeout(server: Server) -> None:
    """And it is not lost while it sends its own."""
    _, address, lost = server
    with hello(address) as connection:
        for _ in range(10):
            assert connection.recv(1) == b"\x00"
            connection.sendall(b"\x00")
    assert not lost.is_set()


def test_a_peer_that_says_goodbye_is_not_lost(server: Server) -> None:
    _, address, lost = server
    with hello(address) as connection:
        connection.sendall(b"\x01")
        assert not lost.wait(3.0)


def test_a_connection_that_closes_without_goodbye_counts_as_silence(server: Server) -> None:
    _, address, lost = server
    hello(address).close()
    assert lost.wait(LIMIT_SECONDS)


def test_a_stranger_is_disconnected(server: Server) -> None:
    _, address, lost = server
    with hello(address, token="00" * 16) as connection:
        assert connection.recv(1) == b""
    assert not lost.is_set()


class Ends:
    """A server and a worker on one clock, which both send beats only when the test lets them."""

    def __init__(self, server: Heartbeats, worker: Heartbeats) -> None:
        self.server, self.worker = server, worker
        self.lost_by: list[str] = []


@pytest.fixture
def clock() -> list[float]:
    """The time, which the test changes."""
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


def test_two_ends_that_run_do_not_lose_each_other(clock: list[float], ends: Ends) -> None:
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
        ends.worker.run_once()
    assert ends.lost_by == []


def test_an_end_that_does_not_run_is_lost_by_the_other(clock: list[float], ends: Ends) -> None:
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
    assert ends.lost_by == ["server"]


def test_an_error_in_a_loss_action_does_not_end_the_heartbeats(
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
    """Stands for a listener whose `accept` fails as long as too many files are open."""

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


def test_accept_is_retried_at_the_next_beat_when_files_run_out(clock: list[float]) -> None:
    with Heartbeats(5.0, lambda: clock[0]) as server:
        address = server.listen("127.0.0.1")
        server.run_once()
        listener = server._listener
        assert listener is not None
        full = NoFilesLeft(listener)
        server._selector.unregister(listener)
        server._listener = full  # type: ignore[assignment]  # it has what is used of a socket
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


def test_an_earlier_loss_is_reported_on_registration(server: Server) -> None:
    heartbeats, address, lost = server
    late = Event()
    with hello(address):
        assert lost.wait(LIMIT_SECONDS)
        heartbeats.when_lost(3, late.set)
    assert late.is_set()
