"""Connections between two processes: framed messages over a TCP socket.

A message is a header of fixed size, which holds a code, the size of the payload and a few numbers,
and the payload. Header and payload leave in one system call, and a payload is received directly
into the memory where it is needed. Received data is never executed or unpickled.

There are two ends: `Connection` blocks, and `NonBlockingConnection` is for a process that serves
many peers in one thread with a selector. Neither has a timeout: a peer may be slow. If it is lost,
another thread calls `lose`.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from paceline.comm.communicator import timeout_message
from paceline.errors import PeerError
from paceline.measure.traffic import Traffic

NUMBERS = 6
"""Numbers in a header; unused ones are 0."""
_HEADER = struct.Struct(f"<QQ{NUMBERS}d")
HEADER_BYTES = _HEADER.size
_PADDING = (0.0,) * NUMBERS
EMPTY = memoryview(b"")

TOKEN_BYTES = 16
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sBI")


class Message(NamedTuple):
    """The header of a message."""

    code: int
    payload_bytes: int
    numbers: tuple[float, ...]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which sends and receives use directly."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


class Connection:
    """The blocking end of a connection. `close` and `lose` may be called from any thread."""

    silent_seconds: float | None = None
    """Seconds without a heartbeat until the peer was lost; None if it is not lost."""
    lost_at: float = 0.0
    """Unix time at which the peer was lost."""

    def __init__(
        self,
        connection: socket.socket,
        own_name: str,
        peer_name: str,
        *,
        is_same_node: bool = False,
        traffic: Traffic | None = None,
    ) -> None:
        """`is_same_node` allows both ends to share memory."""
        self.is_same_node = is_same_node
        self.socket = connection
        self._names = (own_name, peer_name)
        self.traffic = traffic or Traffic()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(True)

    def send(
        self,
        code: int,
        *numbers: float,
        payload: Sequence[memoryview] = (),
        kind: str = "control",
        shared_bytes: int = 0,
    ) -> None:
        """Send a message.

        `shared_bytes` is the size of a payload that the peer reads from shared memory; it counts as
        sent. A message without any payload counts with the size of its header.
        """
        size_bytes = sum(map(len, payload))
        transfer = self.traffic.begin(
            kind, bytes_sent=size_bytes + shared_bytes or HEADER_BYTES, messages=1
        )
        try:
            self._send([_header(code, size_bytes, numbers), *payload])
        except OSError:
            raise self.closed() from None
        finally:
            self.traffic.end(transfer)

    def _send(self, parts: list[bytes | memoryview]) -> None:
        sent = self.socket.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self.socket.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def receive(
        self, payload: memoryview = EMPTY, kind: str = "control", shared_bytes: int = 0
    ) -> Message:
        """Receive a message whose payload has the size of `payload`, and write it there."""
        transfer = self.traffic.begin(
            kind, bytes_received=len(payload) + shared_bytes or HEADER_BYTES
        )
        try:
            message = self._receive_header()
            self.check_size(message, len(payload))
            self._receive_into(payload)
        finally:
            self.traffic.end(transfer)
        return message

    def receive_any(self, kind: str) -> tuple[Message, bytearray]:
        """Receive a message with a payload of any size."""
        message = self._receive_header()
        payload = bytearray(message.payload_bytes)
        transfer = self.traffic.begin(kind, bytes_received=len(payload))
        try:
            self._receive_into(memoryview(payload))
        finally:
            self.traffic.end(transfer)
        return message, payload

    def _receive_header(self) -> Message:
        header = bytearray(HEADER_BYTES)
        self._receive_into(memoryview(header))
        return _decode(header)

    def _receive_into(self, target: memoryview) -> None:
        while target:
            try:
                count = self.socket.recv_into(target, len(target), socket.MSG_WAITALL)
            except OSError:
                count = 0
            if count == 0:
                raise self.closed()
            target = target[count:]

    def check_size(self, message: Message, expected_bytes: int) -> None:
        """Raise an error if the payload of a message has another size."""
        if message.payload_bytes != expected_bytes:
            own, peer = self._names
            raise RuntimeError(
                f"{own}: {peer} sent {message.payload_bytes} bytes instead of {expected_bytes}"
            )

    def closed(self) -> PeerError:
        """Return the error for a connection that the peer or `lose` has closed."""
        own, peer = self._names
        cause = "the connection was closed"
        if self.silent_seconds is not None:
            cause = timeout_message(self.silent_seconds)
        return PeerError(f"{own}: {peer}: {cause}")

    def lose(self, silent_seconds: float) -> None:
        """Fail all transfers, because the peer is lost."""
        self.silent_seconds, self.lost_at = silent_seconds, time.time()
        self._shut_down()

    def close(self) -> None:
        """Close the connection; may be called repeatedly."""
        self._shut_down()
        self.socket.close()

    def _shut_down(self) -> None:
        # Unlike `close`, this ends a transfer that another thread waits for.
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NonBlockingConnection:
    """The end of a process that serves many peers; wraps a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.socket = connection.socket
        self.socket.setblocking(False)
        self._header = bytearray(HEADER_BYTES)
        self._missing = memoryview(self._header)
        """The part of the header or payload that has not arrived."""
        self._message: Message | None = None
        """The message whose payload has not arrived."""
        self._unsent: deque[memoryview] = deque()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def receive(self, target_of: Callable[[Message], memoryview]) -> Message | None:
        """Receive what has arrived, and return the message once it is complete.

        `target_of` returns the memory for the payload of a message. Raises PeerError if the
        connection is closed.
        """
        while True:
            while self._missing:
                try:
                    count = self.socket.recv_into(self._missing)
                except BlockingIOError:
                    return None
                except OSError:
                    count = 0
                if count == 0:
                    raise self._connection.closed()
                self._missing = self._missing[count:]
            message = self._message
            if message is None:
                message = _decode(self._header)
                if message.payload_bytes:
                    target = target_of(message)
                    self._connection.check_size(message, len(target))
                    self._message, self._missing = message, target
                    continue
            self._message, self._missing = None, memoryview(self._header)
            return message

    def send(self, *numbers: float, payload: Sequence[memoryview] = ()) -> None:
        """Send a reply, or the part of it that the socket accepts; `flush` sends the rest."""
        size_bytes = sum(map(len, payload))
        self._unsent.append(memoryview(_header(0, size_bytes, numbers)))
        self._unsent.extend(part for part in payload if len(part))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self.socket.sendmsg(unsent)
            except BlockingIOError:
                return
            except OSError:
                raise self._connection.closed() from None
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = unsent[0][sent:]

    def close(self) -> None:
        self._connection.close()


def _header(code: int, payload_bytes: int, numbers: tuple[float, ...]) -> bytes:
    return _HEADER.pack(code, payload_bytes, *numbers, *_PADDING[len(numbers) :])


def _decode(header: bytearray) -> Message:
    code, payload_bytes, *numbers = _HEADER.unpack(header)
    return Message(code, payload_bytes, tuple(numbers))


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a listener; the token authenticates peers."""

    host: str
    port: int
    token: str

    def encode(self) -> str:
        return f"{self.host} {self.port} {self.token}"

    @classmethod
    def decode(cls, text: str) -> Self:
        host, port, token = text.split()
        return cls(host, int(port), token)

    def connect(self, channel: int, number: int, timeout_seconds: float) -> socket.socket:
        """Connect to the listener; `channel` and `number` identify this end."""
        connection = socket.create_connection((self.host, self.port), timeout_seconds)
        connection.sendall(_HELLO.pack(bytes.fromhex(self.token), channel, number))
        return connection


class Listener:
    """Accepts connections from peers that know its address."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=4096)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.address = Address(host, int(self._socket.getsockname()[1]), self._token.hex())

    def accept(
        self, expected: set[tuple[int, int]], timeout_seconds: float
    ) -> dict[tuple[int, int], socket.socket]:
        """Wait for the expected peers; return their sockets by channel and number.

        Peers that do not connect in time are missing. Connections from anyone else are closed.
        """
        found: dict[tuple[int, int], socket.socket] = {}
        deadline = time.monotonic() + timeout_seconds
        self._socket.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while len(found) < len(expected) and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        with suppress(BlockingIOError, ConnectionError):
                            peer, _ = self._socket.accept()
                            peer.setblocking(False)
                            selector.register(peer, selectors.EVENT_READ, _Greeting(peer))
                        continue
                    greeting = key.data
                    if not greeting.read():
                        continue
                    selector.unregister(greeting.connection)
                    identity = self._identity(greeting.hello)
                    if identity in expected and identity not in found:
                        found[identity] = greeting.connection
                    else:
                        greeting.connection.close()
            for key in selector.get_map().values():
                if key.data is not None:
                    key.data.connection.close()
        return found

    def _identity(self, hello: bytes) -> tuple[int, int] | None:
        """Return channel and number of a peer; None if it does not know the token."""
        if len(hello) < _HELLO.size:
            return None
        token, channel, number = _HELLO.unpack(hello)
        return (channel, number) if secrets.compare_digest(token, self._token) else None

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Greeting:
    """A connection whose peer has not identified itself yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello = b""

    def read(self) -> bool:
        """Return whether the greeting is complete, or the connection is closed."""
        try:
            data = self.connection.recv(_HELLO.size - len(self.hello))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.hello += data
        return not data or len(self.hello) == _HELLO.size
