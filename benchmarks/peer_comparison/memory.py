"""Memory of all workers of a contender together (PSS: shared pages count once)."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.measure.procfs import ProcessTree, pss_bytes
from peer_comparison.group import TITLES, ContenderError, Group, reason_for_absence
from peer_comparison.iteration import Task
from peer_comparison.messages import Train
from peer_comparison.rounds import Skipped, progress

WORKERS = 4
TIMED_UPDATES = 2
SECONDS_BETWEEN_LOOKS = 0.05


@dataclass(frozen=True)
class Row:
    contender: str
    started_bytes: int
    """Connected, without a model: mostly libraries."""
    training_bytes: int
    """Peak during training."""


def compare_memory(names: list[str], task: Task, skipped: Skipped) -> list[dict[str, Any]]:
    """Measure one contender after another, each in new processes."""
    print(
        f"\nmemory of {WORKERS} workers on {task.model}, batch of {task.batch_per_worker} each, MB"
    )
    print(f"{'':17}{'before':>10}{'training':>10}{'for the training':>18}{'to DDP':>9}")
    rows: list[Row] = []
    for name in names:
        try:
            reason = reason_for_absence(name)
            if reason is not None:
                raise ContenderError(reason)
            with closing(Group(name, WORKERS)) as group:
                rows.append(measure(group, task))
        except ContenderError as error:
            skipped.add(TITLES[name], "memory", str(error))
            continue
        show(rows[-1], rows)
    return [asdict(row) for row in rows]


def measure(group: Group, task: Task) -> Row:
    started = held_bytes(group)
    with progress(f"memory of {TITLES[group.name]}"):
        group.ask(replace(task, checked_updates=2).request())
        group.send(Train(TIMED_UPDATES))
        most = held_bytes(group)
        while group.is_busy(SECONDS_BETWEEN_LOOKS):
            most = max(most, held_bytes(group))
        group.answers()
    return Row(group.name, started, most)


def held_bytes(group: Group) -> int:
    """Of the workers and their child processes, without the launcher."""
    tree = ProcessTree(group.pids)
    tree.usage()
    held = pss_bytes(tree.pids)
    if held is None:
        raise ContenderError("its memory may not be looked at")
    return held


def show(row: Row, rows: list[Row]) -> None:
    reference = [each for each in rows if each.contender == "ddp"]
    own = row.training_bytes - row.started_bytes
    print(
        f"{TITLES[row.contender]:17}{row.started_bytes / 1e6:>10.0f}"
        f"{row.training_bytes / 1e6:>10.0f}{own / 1e6:>18.0f}"
        + (f"{row.training_bytes / reference[0].training_bytes:>9.2f}" if reference else "")
    )
