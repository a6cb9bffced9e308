"""What a cluster was asked to be against what it was measured to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
TOLERANCE = 0.1
"""How far what was got may be from what was asked before it is told."""


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    """bandwidth out, bandwidth in, round trip or cpus."""
    node: int | None
    """None: of all nodes alike."""
    asked: float | None
    """None: nothing was asked for."""
    got: float
    unit: str

    @property
    def deviation(self) -> float:
        """As a part of what was asked."""
        return 0.0 if not self.asked else self.got / self.asked - 1

    @property
    def is_off(self) -> bool:
        return abs(self.deviation) > TOLERANCE


@dataclass(frozen=True, slots=True)
class Calibration:
    measured: list[Measured] = field(default_factory=list)
    busy_cores: float = 0.0
    """Cores that other programs kept busy just before; much of it makes the figures doubtful."""

    def warnings(self) -> list[str]:
        """A line for each thing that is over 10 % from what was asked."""
        return [
            f"the emulated cluster's {item.what}{_of(item.node)} is {amount(item.got, item.unit)},"
            f" {100 * item.deviation:+.0f} % from the {amount(item.asked, item.unit)} asked for"
            for item in self.measured
            if item.asked is not None and item.is_off
        ]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Calibration:
        return cls([Measured(**item) for item in values["measured"]], values["busy_cores"])


def _of(node: int | None) -> str:
    return "" if node is None else f" (node {node})"


def amount(value: float, unit: str) -> str:
    """A figure with its unit; of a rate with a prefix, as it was asked for."""
    if unit != "bit/s":
        return f"{value:.3g} {unit}"
    scale, prefix = next((pair for pair in PREFIXES if value >= pair[0]), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}bit/s"
