"""What the bus bandwidth is held against: the link between machines, or the memory of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.probe.plan import Plan


@dataclass(frozen=True, slots=True)
class Limit:
    kind: str
    """link or memory."""
    bytes_per_second: float
    source: str
    """Where the figure comes from, in a few words."""


def link_limit(plan: Plan, cluster: dict[str, Any] | None) -> Limit | None:
    """By --link, or else as the emulated cluster was measured to be (launch/cluster_account.py)."""
    if plan.link_bits_per_second is not None:
        return Limit("link", plan.link_bits_per_second / 8, "as --link says")
    if cluster is None:
        return None
    got = [item["got"] for item in cluster["got"] if item["what"].startswith("bandwidth")]
    if got:
        return Limit("link", min(got) / 8, "as calibrated, the slowest link")
    asked = _asked(cluster["asked"] or {})
    return Limit("link", min(asked) / 8, "as asked of the emulated cluster") if asked else None


def _asked(spec: dict[str, Any]) -> list[float]:
    rates = [spec.get("bandwidth_bits_per_second"), *spec.get("bandwidth_of", {}).values()]
    return [rate for rate in rates if rate is not None]
