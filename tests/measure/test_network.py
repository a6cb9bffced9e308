"""Network byte counters, with loopback separate."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from paceline.measure.procfs import NetworkCounter


def test_loopback_bytes_are_counted_separately_and_in_the_total() -> None:
    counter = NetworkCounter(os.getpid())
    before = counter.totals()
    payload = bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        with client, server.accept()[0] as end:
            sending = threading.Thread(target=client.sendall, args=(payload,))
            sending.start()
            left = len(payload)
            while left:
                left -= len(end.recv(left))
            sending.join()
    after = counter.totals()
    for key in after:
        assert after[key] - before[key] >= len(payload)
    assert after["network_bytes_sent"] >= after["loopback_bytes_sent"]


def test_recreated_interface_counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = NetworkCounter(os.getpid())
    looks = iter([{"lo": (1000, 1000)}, {"eth0": (5, 6)}, {"eth0": (2, 1), "lo": (10, 20)}])
    monkeypatch.setattr(counter, "_last", next(looks))
    monkeypatch.setattr(counter, "_read", lambda: next(looks))
    counter.totals()
    assert counter.totals() == {
        "network_bytes_sent": 5 + 2 + 10,
        "network_bytes_received": 6 + 1 + 20,
        "loopback_bytes_sent": 10,
        "loopback_bytes_received": 20,
    }
