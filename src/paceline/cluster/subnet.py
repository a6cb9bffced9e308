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
"""In each of the networks that addresses may come from."""


def addresses(name: str, count: int) -> list[str]:
    """So many addresses of one /24, chosen by name, past those that are taken.

    Of 10.0.0.0/8, else of 198.18.0.0/15, which is set aside for measuring networks. Nodes are cut
    off from the machine's own network, so a clash does no harm; but an address that means two
    things in one log misleads. Where routes cover everything, only other clusters are avoided.
    """
    prefixes = _candidates(name)
    clusters = _of_other_clusters()
    prefix = (
        _first_free(prefixes, [*_routes(), *clusters])
        or _first_free(prefixes, clusters)
        or prefixes[0]
    )
    return [f"{prefix}{number + 1}" for number in range(count)]


def _first_free(prefixes: list[str], taken: list[str]) -> str | None:
    free = (
        prefix for prefix in prefixes if not any(_overlaps(prefix, network) for network in taken)
    )
    return next(free, None)


def _candidates(name: str) -> list[str]:
    """The first three numbers of addresses, in the order in which they are tried."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2])
    steps = [divmod((start + step * 257) % 65536, 256) for step in range(TRIES)]
    return [
        *(f"10.{high}.{low}." for high, low in steps),
        *(f"198.{18 + high % 2}.{low}." for high, low in steps),
    ]


def _routes() -> list[str]:
    """Networks that the machine has routes to, as a.b.c.d/bits."""
    routes = json.loads(run([program("ip"), "-json", "-4", "route"]) or "[]")
    return [route["dst"] for route in routes if route["dst"] != "default"]


def _of_other_clusters() -> list[str]:
    networks: list[str] = []
    for path in all_paths():
        with contextlib.suppress(ClusterError):
            networks += [f"{address}/24" for address in load(path).addresses[:1]]
    return networks


def _overlaps(prefix: str, network: str) -> bool:
    ours = ipaddress.ip_network(f"{prefix}0/24")
    return ours.overlaps(ipaddress.ip_network(network, strict=False))
