"""How much of the machine other processes had while a run was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number

WORTH_TELLING = 0.15
"""Of the machine; less is the system at work for the run itself."""


@dataclass(frozen=True, slots=True)
class CpuContention:
    label: str
    share: float
    """Of all cores, that others used; of the worst run of the cell."""


def disturbances(cells: Sequence[RunGroup]) -> list[CpuContention]:
    """Of cells that were disturbed, the worst first."""
    found = [
        CpuContention(cell.label, max(shares))
        for cell in cells
        if (shares := [share for run in cell.finished if (share := others_share(run)) is not None])
    ]
    told = [one for one in found if one.share >= WORTH_TELLING]
    return sorted(told, key=lambda one: -one.share)


def others_share(run: Run) -> float | None:
    """None where nobody sampled it."""
    result = run.result or {}
    cores = result.get("hardware", {}).get("cores_in_machine")
    used = [
        (node["machine_cpu_percent_mean"], node["cpu_percent_mean"])
        for node in result.get("nodes", [])
        if is_number(node.get("machine_cpu_percent_mean"))
        and is_number(node.get("cpu_percent_mean"))
    ]
    if not used or not is_number(cores) or not cores:
        return None
    if run.config.cluster:
        # Emulated machines are one: what its other nodes use is the run's as well.
        machine = sum(whole for whole, _ in used) / len(used)
        used = [(machine, sum(own for _, own in used))]
    return max(0.0, *(float(whole / 100 - own / 100 / cores) for whole, own in used))
