"""Addresses for a cluster's nodes, from a network that nothing else here uses."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json

from paceline.cluster.namespaces import program, run
from paceline.cluster.state import all_paths, load
from paceline.errors import ClusterError

TRIES = 64


def addresses(name: str, count: int) -> list[str]:
    """So many addresses of one /24 in 10.0.0.0/8, chosen by name, past those that are taken.

    Nodes are cut off from the machine's own network, so a clash would do no harm there; but an
    address that means two things in one log would mislead.
    """
    taken = _taken()
    digest = hashlib.sha256(name.encode()).digest()
    start = int.from_bytes(digest[:2])
    for step in range(TRIES):
        high, low = divmod((start + step * 257) % 65536, 256)
        prefix = f"10.{high}.{low}."
        if not any(_overlaps(prefix, network) for network in taken):
            return [f"{prefix}{number + 1}" for number in range(count)]
    raise ClusterError("no free network for the nodes among 64 of 10.0.0.0/8")


def _taken() -> list[str]:
    """Networks that the machine has routes to, and those of other clusters, as a.b.c.d/bits."""
    routes = json.loads(run([program("ip"), "-json", "-4", "route"]) or "[]")
    networks = [route["dst"] for route in routes if route["dst"] != "default"]
    for path in all_paths():
        with contextlib.suppress(ClusterError):
            networks += [f"{address}/24" for address in load(path).addresses[:1]]
    return networks


def _overlaps(prefix: str, network: str) -> bool:
    ours = ipaddress.ip_network(f"{prefix}0/24")
    return ours.overlaps(ipaddress.ip_network(network, strict=False))
