"""Fake records of profiled scripts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.analysis.run import Run, open_run
from paceline.records import PHASES, EventWriter, RunFolder
from tests.support.records import FakeRun, write_run

BALANCED = {"forward": 0.004, "backward": 0.005, "exchange": 0.0005, "update": 0.0005}
"""Seconds per step of a rank without faults."""
SCRIPT = "/home/user/train.py"


@dataclass
class FakeScript:
    """A profile of a script whose ranks take so long in the phases of each step."""

    phases: Sequence[Mapping[str, float]] = (BALANCED, BALANCED)
    later: Sequence[Mapping[str, float]] | None = None
    """From step `since` on."""
    since: int = 0
    by_block: Sequence[Sequence[Mapping[str, float]]] = ()
    """Phases of all ranks in each block, where they change with it."""
    steps: int = 200
    block: int = 20
    facts: Sequence[Mapping[str, Any]] = ({}, {})
    """Values of each rank that differ from those without faults, at the end of the run."""
    growth: Sequence[Mapping[str, float]] = ({}, {})
    """Increase per step of such values."""
    more: dict[str, Any] = field(default_factory=dict)
    """Of the result."""

    def phases_at(self, rank: int, step: int) -> Mapping[str, float]:
        if self.by_block:
            return self.by_block[step // self.block][rank]
        has_changed = self.later is not None and step >= self.since
        return self.later[rank] if self.later and has_changed else self.phases[rank]


def line(number: int, code: str) -> dict[str, Any]:
    return {"file": SCRIPT, "line": number, "code": code}


def write_script(root: Path, script: FakeScript) -> Run:
    run = FakeRun(
        "profiled",
        {"command": ["torchrun", SCRIPT]},
        script.later or script.phases,
        iterations=script.steps,
        evaluate_seconds=0.0,
        kind="profile",
        more={
            "nodes": [{"node": 0, "cpu_percent_mean": 190.0, "machine_cpu_percent_mean": 96.0}],
            **script.more,
        },
    )
    path = write_run(root, run)
    for rank in range(len(script.phases)):
        _write_rank(RunFolder(path), script, rank)
    return open_run(path)


def _write_rank(folder: RunFolder, script: FakeScript, rank: int) -> None:
    path = folder.events_file(rank)
    path.unlink()
    events = EventWriter(path)
    events.write(
        "start",
        iteration=0,
        resumed=False,
        workers=len(script.phases),
        rank=rank,
        node=0,
        host="node-a",
    )
    totals = dict.fromkeys(PHASES, 0.0)
    ends = [0, 2, *range(script.block, script.steps + 1, script.block)]
    for first, end in itertools.pairwise(ends):
        seconds = []
        for step in range(first, end):
            spent = script.phases_at(rank, step)
            seconds.append(math.fsum(spent.values()))
            for phase, value in spent.items():
                totals[phase] += value
        events.write("facts", **_facts(script, rank, end, math.fsum(totals.values())))
        events.write("iterations", first=first, seconds=seconds, phases=totals)
    events.close()


def _facts(script: FakeScript, rank: int, steps: int, wall: float) -> dict[str, Any]:
    growth = script.growth[rank]
    usual = {
        "steps": steps,
        "time": 1000.0 + wall,
        "threads": 1,
        "omp_num_threads": "1",
        "cores": 2,
        "cpu_seconds": 2.0 + 0.95 * wall,
        "queue_seconds": 0.1 + 0.01 * wall,
        "main_queue_seconds": 0.05,
        "rss_bytes": 400_000_000,
        "gpu_allocated_bytes": None,
        "calls": [],
        "loaders": [{**line(15, "loader = DataLoader(data)"), "workers": 0, "batch_size": 32,
                     "batches": steps, "seconds": 0.0001 * steps}],
        "ddp_models": [{**line(9, "net = DDP(net)"), "bucket_bytes": [4_000_000, 1_000_000],
                        "find_unused_parameters": False, "unused_bytes": 0, "searches": 0,
                        "search_seconds": 0.0}],
        **script.facts[rank],
    }  # fmt: skip
    for name, per_step in growth.items():
        usual[name] = usual[name] + per_step * steps
    return usual
