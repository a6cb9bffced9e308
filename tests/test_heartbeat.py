"""Heartbeats tell a peer that is lost from one that is slow or has left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from threading import Event

import pytest

from paceline.strategies.parameter_server.heartbeat import Address, Heartbeats, Silence

LIMIT_SECONDS = 30.0
"""For what must happen, on a machine that has other work as well."""


def looks(silence: Silence, times: list[float]) -> list[bool]:
    return [silence.is_too_long(now) for now in times]


def test_a_peer_is_lost_after_the_limit_without_a_beat() -> None:
    silence = Silence(limit_seconds=5.0, interval_seconds=1.0, now=100.0)
    assert looks(silence, [101.0, 102.0, 103.0, 104.0]) == [False] * 4
    assert silence.is_too_long(105.0)


def test_a_beat_starts_the_silence_anew() -> None:
    silence = Silence(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
    assert looks(silence, [1.0, 2.0, 3.0, 4.0]) == [False] * 4
    silence.heard()
    assert looks(silence, [5.0, 6.0, 7.0, 8.0, 9.0]) == [False] * 4 + [True]


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    silence = Silence(limit_seconds=5.0, interval_seconds=1.0, now=0.0)
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


def test_two_ends_that_run_do_not_lose_each_other(server: Server) -> None:
    _, address, lost = server
    lost_there = Event()
    with Heartbeats(timeout_seconds=1.0) as worker:
        worker.connect(address, own_number=3, number=0, limit_seconds=LIMIT_SECONDS)
        worker.when_lost(0, lost_there.set)
        worker.start()
        assert not lost_there.wait(4.0)
    assert not lost.wait(2.0)


def test_a_loss_before_somebody_asks_is_told_when_they_do(server: Server) -> None:
    heartbeats, address, lost = server
    late = Event()
    with hello(address):
        assert lost.wait(LIMIT_SECONDS)
        heartbeats.when_lost(3, late.set)
    assert late.is_set()
