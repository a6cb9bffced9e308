"""A cluster's network: addresses, and a veth pair per node with token buckets at both ends."""

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

MAX_TRIES = 64
"""Candidates in each network that addresses may come from."""


SWITCH = "switch"
"""The bridge that connects the ports."""
PROBE_PORT = "pprobe"
PROBE = "probe"
"""An unshaped link of the switch's namespace, which calibration measures from."""

FRAME_BYTES, PAYLOAD_BYTES = 1514, 1448
"""A full frame and its TCP payload: tbf counts frames, users count payload."""

IPV6 = Path("/proc/sys/net/ipv6")
"""Missing if the kernel has no IPv6; addrgenmode is unknown then."""

FORGET_CONNECTIONS = "echo 1 2>/dev/null >/proc/sys/net/ipv4/tcp_no_metrics_save || :"
"""Connections of a run must not start with what the kernel learned from those of earlier runs;
fails where /proc/sys is read-only."""

QUEUE_SECONDS = 0.05
MIN_QUEUE_BYTES = 4 * 65536
BURST_SECONDS = 0.00105


def addresses(name: str, count: int) -> list[str]:
    """Choose a free /24 by a hash of the name and return `count` of its addresses.

    From 10.0.0.0/8, else from 198.18.0.0/15, which is reserved for benchmarks. Nodes are isolated
    from the machine's network, so a conflict does no harm, but an ambiguous address in a log is
    misleading. If routes cover everything, only other clusters are avoided.
    """
    prefixes = _candidates(name)
    clusters = _networks_of_other_clusters()
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
    """The first three bytes of addresses, in order of preference."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2])
    steps = [divmod((start + step * 257) % 65536, 256) for step in range(MAX_TRIES)]
    return [
        *(f"10.{high}.{low}." for high, low in steps),
        *(f"198.{18 + high % 2}.{low}." for high, low in steps),
    ]


def _routes() -> list[str]:
    """Networks that the machine has routes to, in CIDR notation."""
    routes = json.loads(run([program("ip"), "-json", "-4", "route"]) or "[]")
    return [route["dst"] for route in routes if route["dst"] != "default"]


def _networks_of_other_clusters() -> list[str]:
    networks: list[str] = []
    for path in all_paths():
        with contextlib.suppress(ClusterError):
            networks += [f"{address}/24" for address in load(path).addresses[:1]]
    return networks


def _overlaps(prefix: str, network: str) -> bool:
    ours = ipaddress.ip_network(f"{prefix}0/24")
    return ours.overlaps(ipaddress.ip_network(network, strict=False))


def port(node: int) -> str:
    return f"port{node}"


def mac(node: int) -> str:
    """Ends with the node's number, so that the forwarder does not need to learn addresses."""
    return f"02:70:63:6c:{node >> 8:02x}:{node & 255:02x}"


def connect(switch: Namespace, nodes: Sequence[Namespace], addresses: Sequence[str]) -> None:
    """Give every node an interface `eth0` and a port in the switch's namespace."""
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
        lines += _disable_link_local(name)
    lines += [f"link set {name} up" for name in ports]
    lines += _add_address(PROBE, addresses[probe])
    _batch(switch, "ip", lines)
    for node, address in zip(nodes, addresses, strict=False):
        _batch(node, "ip", ["link set lo up", *_add_address("eth0", address)])
        node.run(["sh", "-c", FORGET_CONNECTIONS])


def bridge(switch: Namespace, count: int) -> None:
    """Connect the ports of `count` nodes and the probe by a bridge."""
    lines = [f"link add {SWITCH} type bridge"]
    lines += [*_disable_link_local(SWITCH), f"link set {SWITCH} up"]
    names = [*map(port, range(count)), PROBE_PORT]
    _batch(switch, "ip", lines + [f"link set {name} master {SWITCH}" for name in names])


def shape(namespace: Namespace, bits_per_second_of: Mapping[str, float]) -> None:
    """Limit the egress rate of these interfaces."""
    lines = [
        f"qdisc add dev {name} root {token_bucket(rate)}"
        for name, rate in bits_per_second_of.items()
    ]
    if lines:
        _batch(namespace, "tc", lines)


def token_bucket(bits_per_second: float) -> str:
    """Arguments of tc that limit TCP payload to this rate."""
    rate, burst = wire_bits_per_second(bits_per_second), burst_bytes(bits_per_second)
    limit = burst + max(int(rate / 8 * QUEUE_SECONDS), MIN_QUEUE_BYTES)
    return f"tbf rate {rate:.0f}bit burst {burst} limit {limit}"


def wire_bits_per_second(bits_per_second: float) -> float:
    """The frame rate at which TCP payload has this rate."""
    return bits_per_second * FRAME_BYTES / PAYLOAD_BYTES


def burst_bytes(bits_per_second: float) -> int:
    """Size of the token bucket: covers timer latency, and little more.

    Up to 150 Mbit/s tbf segments large frames; above that segmenting costs too much CPU, so the
    bucket holds two of them.
    """
    if bits_per_second <= 150e6:
        return 16_000
    return max(131_072, int(bits_per_second / 8 * BURST_SECONDS))


def _add_address(interface: str, address: str) -> list[str]:
    return [
        *_disable_link_local(interface),
        f"address add {address}/24 dev {interface}",
        f"link set {interface} up",
    ]


def _disable_link_local(interface: str) -> list[str]:
    """Without an automatic IPv6 address, ports send no traffic of their own."""
    return [f"link set {interface} addrgenmode none"] if IPV6.exists() else []


def _batch(namespace: Namespace, tool: str, lines: list[str]) -> None:
    namespace.run([program(tool), "-batch", "-"], "\n".join(lines) + "\n")
