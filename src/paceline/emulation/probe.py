"""The program that calibration runs inside nodes; it needs only the standard library.

Usage: echo ADDRESS | ping ADDRESS PORT COUNT | sink ADDRESS SECONDS | source ADDRESS PORT
| spin SECONDS. Listeners print their port first. Results are seconds, bits per second or cores.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

TIMEOUT_SECONDS = 20.0
WARM_UP_SECONDS = 0.15
"""Excluded from a rate: the token bucket's first burst and TCP slow start."""


def echo(address: str) -> None:
    """Echo every byte of one connection."""
    with _accept(address) as peer:
        while received := peer.recv(64):
            peer.sendall(received)


def ping(address: str, port: str, count: str) -> None:
    """Print the median round-trip time of one byte."""
    with socket.create_connection((address, int(port)), TIMEOUT_SECONDS) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = []
        for _ in range(int(count) + 5):
            begin = time.perf_counter()
            peer.sendall(b".")
            peer.recv(1)
            seconds.append(time.perf_counter() - begin)
    _print(repr(statistics.median(seconds[5:])))


def sink(address: str, seconds: str) -> None:
    """Print the rate at which bytes of one connection arrive, after the warm-up."""
    buffer = bytearray(1 << 20)
    with _accept(address) as peer:
        peer.recv_into(buffer)
        start = now = time.perf_counter()
        while now < start + WARM_UP_SECONDS and peer.recv_into(buffer):
            now = time.perf_counter()
        counted, start = 0, now
        while now < start + float(seconds) and (received := peer.recv_into(buffer)):
            now = time.perf_counter()
            counted += received
    _print(repr(counted * 8 / (now - start) if now > start else 0.0))


def source(address: str, port: str) -> None:
    """Send until the other end closes the connection."""
    block = bytes(1 << 18)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with socket.create_connection((address, int(port)), TIMEOUT_SECONDS) as peer:
        try:
            while time.monotonic() < deadline:
                peer.sendall(block)
        except OSError:
            return


def spin(seconds: str) -> None:
    """Print how many cores a busy loop gets."""
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < float(seconds):
        pass
    _print(repr((time.process_time() - used) / (time.perf_counter() - begin)))


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(TIMEOUT_SECONDS)
        _print(str(listener.getsockname()[1]))
        peer, _ = listener.accept()
    peer.settimeout(TIMEOUT_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _print(line: str) -> None:
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
