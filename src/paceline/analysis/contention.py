"""CPU use of other processes during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number

MIN_CONTENTION_SHARE = 0.15
"""Share of the CPU; less is the operating system serving the run itself."""


@dataclass(frozen=True, slots=True)
class CpuContention:
    label: str
    share: float
    """Of all cores, used by other processes in the worst run of the group."""


def find_contention(groups: Sequence[RunGroup]) -> list[CpuContention]:
    """Groups with CPU contention, the worst first."""
    found = [
        CpuContention(group.label, max(shares))
        for group in groups
        if (
            shares := [
                share for run in group.finished if (share := other_processes_share(run)) is not None
            ]
        )
    ]
    return sorted(
        (one for one in found if one.share >= MIN_CONTENTION_SHARE), key=lambda one: -one.share
    )


def other_processes_share(run: Run) -> float | None:
    """The share of the CPU that other processes used; None if it was not sampled."""
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
    if run.settings.cluster:
        # Emulated nodes share one machine, so the CPU use of the other nodes belongs to the run.
        machine = sum(whole for whole, _ in used) / len(used)
        used = [(machine, sum(own for _, own in used))]
    return max(0.0, *(float(whole / 100 - own / 100 / cores) for whole, own in used))
