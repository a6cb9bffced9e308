"""The description of an emulated cluster, as in `--cluster` and study files.

For example `nodes=4,cpus=0.5,bandwidth=1gbit,latency=200us,slow=3:0.25`. Nodes with other values
follow after a slash: `bandwidth=1gbit/3:100mbit`, `slow=2:0.5/3:0.25`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import shown

MOST_NODES = 250
"""Each node has an address in one /24 network."""

MOST_LATENCY_SECONDS = 1.0
"""Calibrating a longer one would take minutes."""

LEAST_CPUS, MOST_CPUS = 0.001, 10_000
"""The kernel's smallest quota is 1 ms in a period of 1 s."""
LEAST_BITS, MOST_BITS = 1e3, 1e12
LEAST_LATENCY_SECONDS = 1e-6

CPUS = f"cpus of {LEAST_CPUS:g} to {MOST_CPUS}"
SLOW = f"slow as node:part with a part of {LEAST_CPUS:g} to 1"
RATE = "a rate of 1kbit to 1000gbit such as 1gbit or 100mbit"
LATENCY = f"a latency of 1us to {MOST_LATENCY_SECONDS:g}s"

_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    nodes: int
    cpus: float | None = None
    """CPU time of a node in cores; None: no limit."""
    bandwidth_bits_per_second: float | None = None
    """Of a node's link, in each direction; None: no limit."""
    bandwidth_of: dict[int, float] = field(default_factory=dict)
    """Nodes with a different bandwidth."""
    latency_seconds: float = 0.0
    """Round trip of a small message between two nodes; 0: no added latency."""
    slow: dict[int, float] = field(default_factory=dict)
    """Nodes with only this fraction of `cpus`, or of the machine's cores without `cpus`."""

    def bandwidth(self, node: int) -> float | None:
        return self.bandwidth_of.get(node, self.bandwidth_bits_per_second)

    def cpus_of(self, node: int, cores: int) -> float | None:
        """Return the CPU quota of a node on a machine with `cores` cores; None: no limit."""
        if node in self.slow:
            return self.slow[node] * (self.cpus or cores)
        return self.cpus


def parse(text: str) -> ClusterSpec:
    """Parse a description; a ValueError has the valid values."""
    spec = parse_recorded(text)
    _check_ranges(spec)
    return spec


def parse_recorded(text: str) -> ClusterSpec:
    """Like `parse`, without the limits of new input, which recorded runs may exceed."""
    values = dict(_pair(part) for part in text.split(",") if part.strip())
    unknown = [
        key for key in values if key not in ("nodes", "cpus", "bandwidth", "latency", "slow")
    ]
    if unknown:
        raise ValueError(
            f"made of nodes, cpus, bandwidth, latency and slow, not {shown(unknown[0])}"
        )
    nodes = _whole(values.get("nodes", ""))
    if nodes is None or not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"given nodes=1 to nodes={MOST_NODES}")
    rate, rate_of = _by_node(values.get("bandwidth", ""), nodes, "bandwidth", _rate)
    latency = values.get("latency")
    cpus = _positive(values["cpus"], CPUS) if "cpus" in values else None
    slow = _by_node(values.get("slow", ""), nodes, "slow", _fraction, needs_node=True)[1]
    return ClusterSpec(
        nodes=nodes,
        cpus=cpus,
        bandwidth_bits_per_second=rate,
        bandwidth_of=rate_of,
        latency_seconds=_latency(latency) if latency else 0.0,
        slow=slow,
    )


def _check_ranges(spec: ClusterSpec) -> None:
    rates = [spec.bandwidth_bits_per_second, *spec.bandwidth_of.values()]
    if any(rate is not None and not LEAST_BITS <= rate <= MOST_BITS for rate in rates):
        raise ValueError(f"given {RATE}")
    if spec.latency_seconds and spec.latency_seconds < LEAST_LATENCY_SECONDS:
        raise ValueError(f"given {LATENCY}")
    if spec.cpus is not None and not LEAST_CPUS <= spec.cpus <= MOST_CPUS:
        raise ValueError(f"given {CPUS}")
    if any(part < LEAST_CPUS for part in spec.slow.values()):
        raise ValueError(f"given {SLOW}")
    if spec.cpus is not None and any(spec.cpus * part < LEAST_CPUS for part in spec.slow.values()):
        raise ValueError(f"given cpus times slow of at least {LEAST_CPUS:g} for each node")


def bits_per_second(text: str) -> float:
    """Parse a rate such as 1gbit, 100mbit or 2.5gbit."""
    rate = _rate(text)
    if not LEAST_BITS <= rate <= MOST_BITS:
        raise ValueError(f"given {RATE}, not {shown(text)}")
    return rate


def _rate(text: str) -> float:
    number, unit = _with_unit(text, _BITS, RATE)
    if not math.isfinite(number):
        raise ValueError(f"given {RATE}, not {shown(text)}")
    return number * _BITS[unit]


def seconds(text: str) -> float:
    """Parse a time such as 200us or 2ms."""
    number, unit = _with_unit(text, _PER_SECOND, "a time such as 200us or 2ms")
    return number / _PER_SECOND[unit]


def _latency(text: str) -> float:
    number = seconds(text)
    if number > MOST_LATENCY_SECONDS:
        raise ValueError(f"given {LATENCY}, not {shown(text)}")
    return number


def _pair(part: str) -> tuple[str, str]:
    key, equals, value = part.strip().partition("=")
    if not equals or not value.strip():
        raise ValueError(f"key=value pairs, not {shown(part.strip())}")
    return key.strip(), value.strip()


def _by_node(
    text: str, nodes: int, key: str, read: Callable[[str], float], *, needs_node: bool = False
) -> tuple[float | None, dict[int, float]]:
    """Parse `VALUE/NODE:VALUE/...`: the common value, and those of other nodes."""
    common, differing = None, {}
    for part in filter(None, text.split("/")):
        node, colon, value = part.rpartition(":")
        if not colon and not needs_node and common is None:
            common = read(part)
        elif (number := _whole(node)) is not None and number < nodes:
            differing[number] = read(value)
        else:
            raise ValueError(f"given {key} of nodes below {nodes} as node:value, not {shown(part)}")
    return common, differing


def _with_unit(text: str, units: dict[str, float], wanted: str) -> tuple[float, str]:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise ValueError(f"given {wanted}, not {shown(text)}")
    return float(match[1]), match[2]


def _whole(text: str) -> int | None:
    """Parse a number of at most nine digits."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _fraction(text: str) -> float:
    number = _positive(text, SLOW)
    if number > 1:
        raise ValueError(f"given {SLOW}, not {shown(text)}")
    return number


def _positive(text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"given {wanted}, not {shown(text)}")
    return number
