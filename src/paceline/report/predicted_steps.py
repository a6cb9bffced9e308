"""What to try next according to a plan that is made from the runs of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.analysis.run import Run


def predicted_steps(runs: Sequence[Run], comm: Sequence[Path]) -> list[str]:
    """Configurations that are predicted to be faster; empty if nothing can be predicted."""
    # Without a measured collective there is no plan, so the planner need not be imported.
    if not comm and not any(map(_has_measured_collectives, runs)):
        return []
    from paceline.plan.next_runs import next_runs
    from paceline.report.wording.plan import next_run_text

    found = next_runs(runs, comm)
    return [] if found is None else [next_run_text(each, found.fastest) for each in found.found]


def _has_measured_collectives(run: Run) -> bool:
    return any((worker.get("buckets") or {}).get("measurements") for worker in run.workers)
