"""What calibration runs inside nodes, as a program of its own that needs only Python.

echo ADDRESS | ping ADDRESS PORT COUNT | sink ADDRESS SECONDS | source ADDRESS PORT | spin SECONDS.
Those that listen write their port first; results are written in seconds, bits per second or cores.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

PATIENCE_SECONDS = 20.0
WARM_UP_SECONDS = 0.15
"""Not counted in a rate: the token bucket's first burst, and TCP finding its pace."""


def echo(address: str) -> None:
    """Send back every byte of one connection."""
    with _accept(address) as peer:
        while received := peer.recv(64):
            peer.sendall(received)


def ping(address: str, port: str, count: str) -> None:
    """The median round trip of one byte."""
    with socket.create_connection((address, int(port)), PATIENCE_SECONDS) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(int(count) + 5):
            begin = time.perf_counter()
            peer.sendall(b".")
            peer.recv(1)
            seconds.append(time.perf_counter() - begin)
    _say(repr(statistics.median(seconds[5:])))


def sink(address: str, seconds: str) -> None:
    """The rate at which one connection's bytes arrive, once it is under way."""
    space = bytearray(1 << 20)
    with _accept(address) as peer:
        peer.recv_into(space)
        start = now = time.perf_counter()
        while now < start + WARM_UP_SECONDS and peer.recv_into(space):
            now = time.perf_counter()
        counted, start = 0, now
        while now < start + float(seconds) and (received := peer.recv_into(space)):
            now = time.perf_counter()
            counted += received
    _say(repr(counted * 8 / (now - start) if now > start else 0.0))


def source(address: str, port: str) -> None:
    """Send until the other end has enough."""
    block = bytes(1 << 18)
    deadline = time.monotonic() + PATIENCE_SECONDS
    with socket.create_connection((address, int(port)), PATIENCE_SECONDS) as peer:
        try:
            while time.monotonic() < deadline:
                peer.sendall(block)
        except OSError:
            return


def spin(seconds: str) -> None:
    """The cores' worth of CPU time that a busy loop gets."""
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < float(seconds):
        pass
    _say(repr((time.process_time() - used) / (time.perf_counter() - begin)))


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        _say(str(listener.getsockname()[1]))
        peer, _ = listener.accept()
    peer.settimeout(PATIENCE_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


PROBES: dict[str, Callable[..., None]] = {
    "echo": echo,
    "ping": ping,
    "sink": sink,
    "source": source,
    "spin": spin,
}

if __name__ == "__main__":
    PROBES[sys.argv[1]](*sys.argv[2:])
