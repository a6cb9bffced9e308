"""Connections: messages of any size, blocking and non-blocking, closed and lost peers."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from time import sleep

import pytest
import torch

from paceline.comm.communicator import timeout_message
from paceline.comm.connection import (
    HEADER_BYTES,
    Connection,
    Listener,
    Message,
    NonBlockingConnection,
    bytes_of,
)
from paceline.errors import PeerError
from paceline.measure.traffic import Traffic

LIMIT_SECONDS = 30.0
LARGE = 4_000_000
"""Elements of a message that is larger than the buffers of a socket."""

Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    sockets = socket.socketpair()
    with (
        Connection(sockets[0], "rank 0", "server 0", traffic=Traffic()) as worker,
        Connection(sockets[1], "server 0", "rank 0") as server,
    ):
        yield worker, server


@pytest.mark.parametrize("elements", [0, 1, 1000, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_message_arrives_unchanged(ends: Ends, elements: int, dtype: torch.dtype) -> None:
    sent = torch.arange(elements).to(dtype)
    received = torch.empty_like(sent)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(ends[0].send, 7, 0.5, -1.0, payload=[bytes_of(sent)])
        message = ends[1].receive(bytes_of(received))
        sending.result()
    assert (message.code, message.numbers[:3]) == (7, (0.5, -1.0, 0.0))
    assert torch.equal(received, sent)


def test_parts_of_a_payload_are_concatenated(ends: Ends) -> None:
    ends[0].send(1, payload=[memoryview(b"ab"), memoryview(b""), memoryview(b"cde")])
    assert ends[1].receive_any("control")[1] == b"abcde"


def test_a_payload_of_another_size_is_an_error(ends: Ends) -> None:
    ends[0].send(1, payload=[memoryview(b"abc")])
    with pytest.raises(RuntimeError, match="rank 0 sent 3 bytes instead of 2"):
        ends[1].receive(memoryview(bytearray(2)))


def test_a_non_blocking_end_receives_and_sends_messages_larger_than_its_buffers(ends: Ends) -> None:
    served, target = NonBlockingConnection(ends[1]), torch.empty(LARGE)
    sent, received = torch.rand(LARGE), torch.empty(LARGE)

    def exchange() -> None:
        ends[0].send(1, payload=[bytes_of(sent)])
        # The server must not block while the worker does not receive.
        sleep(0.05)
        ends[0].receive(bytes_of(received))

    thread = Thread(target=exchange)
    thread.start()
    with selectors.DefaultSelector() as selector:
        selector.register(served.socket, selectors.EVENT_READ)
        message: Message | None = None
        while message is None:
            assert selector.select(LIMIT_SECONDS)
            message = served.receive(lambda _: bytes_of(target))
        served.send(payload=[bytes_of(target)])
        selector.modify(served.socket, selectors.EVENT_WRITE)
        while served.has_unsent:
            assert selector.select(LIMIT_SECONDS)
            served.flush()
    thread.join(LIMIT_SECONDS)
    assert torch.equal(received, sent)


def test_non_blocking_end_keeps_the_order_of_messages(ends: Ends) -> None:
    served = NonBlockingConnection(ends[1])
    for code in range(3):
        ends[0].send(code)
    assert [(served.receive(bytes_of_nothing) or end()).code for _ in range(3)] == [0, 1, 2]
    assert served.receive(bytes_of_nothing) is None


def bytes_of_nothing(_: Message) -> memoryview:
    return memoryview(b"")


def end() -> Message:
    raise AssertionError("no message arrived")


def test_payload_counts_under_its_kind_and_a_bare_header_as_control() -> None:
    traffic, sockets = Traffic(), socket.socketpair()
    with (
        Connection(sockets[0], "rank 0", "server 0", traffic=traffic) as worker,
        Connection(sockets[1], "server 0", "rank 0") as server,
    ):
        worker.send(1)
        worker.send(1, payload=[memoryview(bytes(100))], kind="gradients")
        worker.send(1, kind="gradients", shared_bytes=1000)
        server.send(1)
        worker.receive(kind="parameters", shared_bytes=500)
    counts = traffic.counts
    assert (counts["control"].bytes_sent, counts["control"].messages) == (HEADER_BYTES, 1)
    assert (counts["gradients"].bytes_sent, counts["gradients"].messages) == (1100, 2)
    assert counts["parameters"].bytes_received == 500


def test_closed_peer_is_a_one_line_error(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(PeerError, match=r"^rank 0: server 0: the connection was closed$"):
        ends[0].receive()
    with pytest.raises(PeerError, match=r"^rank 0: server 0: the connection was closed$"):
        ends[0].send(1)


def test_losing_the_peer_ends_a_send_in_another_thread(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(ends[0].send, 1, payload=[memoryview(bytes(100_000_000))])
        ends[0].lose(4.0)
        error = sending.exception(LIMIT_SECONDS)
    assert str(error) == f"rank 0: server 0: {timeout_message(4.0)}"


def test_losing_the_peer_ends_a_receive_in_another_thread(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(ends[0].receive)
        ends[0].lose(4.0)
        error = receiving.exception(LIMIT_SECONDS)
    assert str(error) == f"rank 0: server 0: {timeout_message(4.0)}"


def test_listener_returns_expected_peers_and_disconnects_strangers() -> None:
    with Listener("127.0.0.1") as listener:
        address = listener.address
        silent = socket.create_connection((address.host, address.port), LIMIT_SECONDS)
        wrong = type(address)(address.host, address.port, "00" * 16)
        peers = [
            wrong.connect(0, 1, LIMIT_SECONDS),
            address.connect(0, 9, LIMIT_SECONDS),
            address.connect(0, 1, LIMIT_SECONDS),
            address.connect(1, 1, LIMIT_SECONDS),
        ]
        found = listener.accept({(0, 1), (1, 1)}, LIMIT_SECONDS)
    assert found.keys() == {(0, 1), (1, 1)}
    for refused in (silent, *peers[:2]):
        assert refused.recv(1) == b""
    for each in (silent, *peers, *found.values()):
        each.close()


def test_listener_gives_up_on_missing_peers() -> None:
    with Listener("127.0.0.1") as listener, listener.address.connect(0, 0, LIMIT_SECONDS):
        found = listener.accept({(0, 0), (0, 1)}, 0.2)
    assert found.keys() == {(0, 0)}
    found[0, 0].close()
