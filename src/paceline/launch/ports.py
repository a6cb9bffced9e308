"""Ports that nobody listens on."""

from __future__ import annotations

import socket


def free_port(address: str) -> int:
    """On this machine, for an address of this kind."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
