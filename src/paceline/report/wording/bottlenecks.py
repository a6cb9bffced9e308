"""The sentences about what limits the step time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.phases import Bottleneck, CommunicationCause, PhaseBreakdown

SHARES = {
    "compute": "compute",
    "communication": "exposed communication",
    "waiting": "waiting",
    "input": "input",
    "other": "other code",
}
"""Shares of a bottleneck."""

PHASES = {"exchange": "exposed communication", "wait": "waiting", "other": "other code"}
"""Phases whose name in a sentence differs from that in tables."""
NEGLIGIBLE = 0.0005
"""A share that is shown as 0.0%."""


def division(split: PhaseBreakdown) -> list[str]:
    """The share of each phase."""
    return [
        f"{formatting.share(split.share(phase))} {PHASES.get(phase, phase)}"
        for phase in split.seconds
        if split.share(phase) >= NEGLIGIBLE
    ]


def shares_text(bottleneck: Bottleneck) -> str:
    text = f"iteration time: {', '.join(division(bottleneck.split))}"
    wire = bottleneck.wire
    if bottleneck.cause is None or wire is None:
        return text
    return (
        f"{text}; {formatting.size(wire.bytes)} take {formatting.seconds(wire.seconds)} of the"
        f" {formatting.seconds(bottleneck.exchange_seconds)} at the measured"
        f" {formatting.rate(wire.bytes_per_second)}, so the likely cause is"
        f" {_communication_cause(bottleneck.cause)}"
    )


def several_text(found: Sequence[Bottleneck]) -> str:
    first = found[0]
    names = formatting.listed([one.label for one in found])
    shares = [one.shares[first.main_share] for one in found]
    low, high = formatting.share(min(shares)), formatting.share(max(shares))
    span = low if low == high else f"{low} to {high}"
    cause = ""
    if first.cause is not None:
        wires = [one.wire.seconds for one in found if one.wire is not None]
        cause = (
            f"; the bytes take at most {formatting.seconds(max(wires))} on the measured link,"
            f" so the likely cause is {_communication_cause(first.cause)}"
        )
    return f"{names}: {SHARES[first.main_share]} is {span} of each iteration{cause}."


def _communication_cause(cause: CommunicationCause) -> str:
    if cause.cpu_quota is not None:
        quota = f"{cause.cpu_quota:g}"
        return f"the CPU quota of {quota} cores per node (processes wait to be scheduled)"
    if cause.cores is not None:
        return f"CPU contention: {cause.threads} threads of the workers share {cause.cores:g} cores"
    return "scheduling or communication software, not the link"
