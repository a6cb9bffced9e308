"""What limits the pace of a cell: computing, the network, waiting for one another, or the input."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.report import units
from paceline.report.cells import Cell
from paceline.report.phases import COMPUTING, of_cell

MOST = 0.5
"""A share of an iteration from which on something is what limits it."""
LITTLE = 0.25
"""With no more exposed communication and waiting than this, computing is the limit."""


@dataclass(frozen=True, slots=True)
class Bound:
    label: str
    kind: str
    telling: str
    """The key of `shares` that shows it."""
    shares: dict[str, float]
    """Of an iteration: computing, communication, waiting, input."""

    def reason(self) -> str:
        parts = [
            f"{name} {units.share(value)}"
            for name, value in self.shares.items()
            if name != "input" and value >= 0.0005
        ]
        return f"of an iteration {', '.join(parts)}"


def bound_of(cell: Cell) -> Bound | None:
    """None where there are no phases to tell."""
    split = of_cell(cell)
    if split is None or not split.total:
        return None
    shares = {
        "computing": split.of(COMPUTING) / split.total,
        "communication": split.share("exchange"),
        "waiting": split.share("wait"),
        "input": split.share("input"),
    }
    if shares["input"] >= MOST:
        return Bound(cell.label, "input-bound", "input", shares)
    if shares["communication"] >= MOST or (
        shares["communication"] > shares["computing"]
        and shares["communication"] > shares["waiting"]
    ):
        return Bound(cell.label, "network-bound", "communication", shares)
    if shares["waiting"] >= LITTLE and shares["waiting"] > shares["communication"]:
        return Bound(cell.label, "held up by waiting", "waiting", shares)
    if 1 - shares["computing"] <= LITTLE:
        return Bound(cell.label, "compute-bound", "computing", shares)
    if shares["waiting"] > shares["communication"]:
        return Bound(cell.label, "computing and waiting", "waiting", shares)
    return Bound(cell.label, "computing and network", "communication", shares)
