"""Links between workers: nominal bandwidth and latency, as in `--link 10gbit,100us`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config import cluster_spec
from paceline.config.cluster_spec import ClusterSpec
from paceline.errors import shown

EXAMPLE = "a bandwidth and a round trip such as 10gbit,100us"


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a host, in each direction, and the round trip between two hosts."""

    bits_per_second: float
    round_trip_seconds: float = 0.0

    def problems(self) -> Iterator[str]:
        """Values that no link has."""
        if self.bits_per_second <= 0 or self.round_trip_seconds < 0:
            yield "links must have a bandwidth above 0, and no latency below 0"

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        """As `parse_link` reads it."""
        rate = _with_unit(self.bits_per_second, {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3})
        if not self.round_trip_seconds:
            return rate
        units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
        return f"{rate},{_with_unit(self.round_trip_seconds, units)}"


def parse_link(text: str) -> Link:
    """Parse `10gbit,100us` or `10gbit`; the ValueError completes the sentence "must be ..."."""
    rate, _, latency = text.partition(",")
    try:
        round_trip = cluster_spec.seconds(latency) if latency.strip() else 0.0
        link = Link(cluster_spec.bits_per_second(rate), round_trip)
    except ValueError:
        raise ValueError(f"{EXAMPLE}, got {shown(text)}") from None
    if link.round_trip_seconds > cluster_spec.MOST_LATENCY_SECONDS:
        raise ValueError(f"{EXAMPLE}, with a round trip of at most 1s, got {shown(text)}")
    return link


def link_of_cluster(spec: ClusterSpec) -> Link | None:
    """The slowest link of an emulated cluster; None if its links are not limited."""
    rates = [rate for node in range(spec.nodes) if (rate := spec.bandwidth(node)) is not None]
    return Link(min(rates), spec.latency_seconds) if rates else None


def _with_unit(value: float, units: dict[str, float]) -> str:
    """In the largest unit in which the value is at least 1."""
    name, size = next(
        ((name, size) for name, size in units.items() if value >= size), [*units.items()][-1]
    )
    return f"{value / size:.6g}{name}"
