"""Addresses for a cluster's nodes, from a network that nothing else here uses.

Links of nodes to their switch: a veth pair each, shaped by a token bucket at both ends."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.emulation.namespaces import Namespace, program, run
from paceline.emulation.state import all_paths, load
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


SWITCH = "switch"
"""The bridge that joins the ports, where no latency is asked for."""
PROBE_PORT = "pprobe"
PROBE = "probe"
"""A link that is not shaped, from the switch's own namespace: what calibration measures from."""

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
"""Of a full frame, and what TCP carries in it: tbf counts frames, users count what arrives."""

IPV6 = Path("/proc/sys/net/ipv6")
"""Missing where the kernel has no IPv6, and then it knows no addrgenmode either."""

QUEUE_SECONDS = 0.05
LEAST_QUEUE_BYTES = 4 * 65536
BURST_SECONDS = 0.00105


def port(node: int) -> str:
    return f"port{node}"


def mac(node: int) -> str:
    """Ends in the node's number, so that a forwarder need not learn who is where."""
    return f"02:70:63:6c:{node >> 8:02x}:{node & 255:02x}"


def connect(switch: Namespace, nodes: Sequence[Namespace], addresses: Sequence[str]) -> None:
    """Give every node an interface `eth0` with its address and a port in the switch's namespace."""
    lines = ["link set lo up"]
    for number, node in enumerate(nodes):
        lines.append(
            f"link add {port(number)} type veth peer name eth0 "
            f"address {mac(number)} netns {node.holder.pid}"
        )
    probe = len(nodes)
    lines.append(f"link add {PROBE_PORT} type veth peer name {PROBE} address {mac(probe)}")
    ports = [*map(port, range(len(nodes))), PROBE_PORT]
    for name in ports:
        lines += _no_own_address(name)
    lines += [f"link set {name} up" for name in ports]
    lines += _address(PROBE, addresses[probe])
    _batch(switch, "ip", lines)
    for node, address in zip(nodes, addresses, strict=False):
        _batch(node, "ip", ["link set lo up", *_address("eth0", address)])


def bridge(switch: Namespace, count: int) -> None:
    """Join the ports of so many nodes, and the probe's."""
    lines = [f"link add {SWITCH} type bridge"]
    lines += [*_no_own_address(SWITCH), f"link set {SWITCH} up"]
    names = [*map(port, range(count)), PROBE_PORT]
    _batch(switch, "ip", lines + [f"link set {name} master {SWITCH}" for name in names])


def shape(namespace: Namespace, bits_per_second_of: Mapping[str, float]) -> None:
    """Hold what leaves through these interfaces of a namespace to its rates."""
    lines = [
        f"qdisc add dev {name} root {token_bucket(rate)}"
        for name, rate in bits_per_second_of.items()
    ]
    if lines:
        _batch(namespace, "tc", lines)


def token_bucket(bits_per_second: float) -> str:
    """The words for tc that let TCP carry so much, framing not counted."""
    rate, burst = framed(bits_per_second), burst_bytes(bits_per_second)
    limit = burst + max(int(rate / 8 * QUEUE_SECONDS), LEAST_QUEUE_BYTES)
    return f"tbf rate {rate:.0f}bit burst {burst} limit {limit}"


def framed(bits_per_second: float) -> float:
    """The rate on the wire at which TCP carries so much."""
    return bits_per_second * FRAME_BYTES / PAYLOAD_BYTES


def burst_bytes(bits_per_second: float) -> int:
    """What may pass at once after a pause: enough for the timer's lateness, and little more.

    Up to 150 Mbit/s tbf cuts large frames up; over that it would cost too much, so two fit in.
    """
    if bits_per_second <= 150e6:
        return 16_000
    return max(131_072, int(bits_per_second / 8 * BURST_SECONDS))


def _address(interface: str, address: str) -> list[str]:
    return [
        *_no_own_address(interface),
        f"address add {address}/24 dev {interface}",
        f"link set {interface} up",
    ]


def _no_own_address(interface: str) -> list[str]:
    """Without the address that IPv6 would make by itself, ports answer nothing, add no traffic."""
    return [f"link set {interface} addrgenmode none"] if IPV6.exists() else []


def _batch(namespace: Namespace, tool: str, lines: list[str]) -> None:
    namespace.run([program(tool), "-batch", "-"], "\n".join(lines) + "\n")
