"""Heartbeats distinguish lost peers from slow ones and from those that have left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Event

import pytest

from paceline.strategies.parameter_server.heartbeat import Heartbeats, SilenceTimer

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
def peer() -> Iterator[tuple[socket.socket, Event]]:
    """The other end of a running process's connection to peer 3, and whether the peer is lost.

    The peer sends no heartbeats on its own.
    """
    lost = Event()
    own, other = socket.socketpair()
    other.settimeout(LIMIT_SECONDS)
    with other, Heartbeats(timeout_seconds=1.0) as heartbeats:
        heartbeats.add(own, 3)
        heartbeats.when_lost(3, lost.set)
        heartbeats.start()
        yield other, lost


Peer = tuple[socket.socket, Event]


def test_connected_but_silent_peer_is_lost(peer: Peer) -> None:
    assert peer[1].wait(LIMIT_SECONDS)


def test_peer_receives_heartbeats_beyond_the_timeout(peer: Peer) -> None:
    """The peer is not lost while it sends heartbeats, too."""
    connection, lost = peer
    for _ in range(10):
        assert connection.recv(1) == b"\x00"
        connection.sendall(b"\x00")
    assert not lost.is_set()


def test_peer_that_says_goodbye_is_not_lost(peer: Peer) -> None:
    connection, lost = peer
    connection.sendall(b"\x01")
    assert not lost.wait(3.0)


def test_connection_closed_without_goodbye_counts_as_silence(peer: Peer) -> None:
    connection, lost = peer
    connection.close()
    assert lost.wait(LIMIT_SECONDS)


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
        sockets = socket.socketpair()
        server.add(sockets[0], 3)
        worker.add(sockets[1], 0)
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


def test_earlier_loss_is_reported_on_registration(clock: list[float], ends: Ends) -> None:
    for _ in range(20):
        clock[0] += 1.0
        ends.server.run_once()
    late: list[str] = []
    ends.server.when_lost(3, lambda: late.append("server"))
    assert late == ["server"]
