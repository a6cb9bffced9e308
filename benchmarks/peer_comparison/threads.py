"""Two workers with one thread each and one process with two threads, at the same global batch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from peer_comparison.group import TITLES, ContenderError, Fleet, Group
from peer_comparison.iteration import Task
from peer_comparison.messages import Train
from peer_comparison.rounds import (
    Length,
    Spread,
    milliseconds,
    progress,
    quartiles,
    ratio_text,
    speed_ups,
    take_turns,
)

MODELS = ("mlp", "lenet")
WORKERS = 2


@dataclass(frozen=True)
class Row:
    model: str
    global_batch: int
    workers: Spread
    threads: Spread
    speed_up: Spread
    """Speedup of the workers over the threads."""


def compare_threads(fleet: Fleet, tasks: list[Task], length: Length) -> list[dict[str, Any]]:
    if not fleet.starting(["shared"]):
        return []
    print("\none update: 2 workers of 1 thread (`shared`) and 1 process of 2 threads; ms")
    print(
        f"{'':7}{'batch':>6}{'2 workers':>11}{'quartiles':>12}{'2 threads':>11}{'quartiles':>12}"
        f"{'times as fast':>17}"
    )
    rows = []
    try:
        with closing(Group("single", 1, threads=WORKERS)) as alone:
            for task in tasks:
                row = measure(fleet, alone, task, length)
                if row is not None:
                    show(row)
                    rows.append(asdict(row))
    except ContenderError as error:
        fleet.skipped.add(TITLES["single"], f"{WORKERS} threads", str(error))
    return rows


def measure(fleet: Fleet, alone: Group, task: Task, length: Length) -> Row | None:
    with progress(f"{task.model}, workers and threads"):
        team = fleet.attempt("shared", lambda group: group.prepared(task.request()))
        if team is None:
            return None
        one = alone.prepared(task.request(workers_in_one=WORKERS))
        updates = {
            "team": length.count(team.update_seconds),
            "one": length.count(one.update_seconds),
        }

        def run(name: str) -> float | None:
            request = Train(updates[name])
            if name == "one":
                return alone.seconds(request)
            return fleet.attempt("shared", lambda group: group.seconds(request))

        blocks = take_turns(["team", "one"], length.most_repeats, run)
    if "team" not in blocks:
        return None
    return Row(
        model=task.model,
        global_batch=WORKERS * task.batch_per_worker,
        workers=Spread.of_blocks(blocks["team"]),
        threads=Spread.of_blocks(blocks["one"]),
        speed_up=Spread.of(speed_ups(blocks["team"], blocks["one"])),
    )


def show(row: Row) -> None:
    print(
        f"{row.model:7}{row.global_batch:>6}{milliseconds(row.workers.median):>11}"
        f"{quartiles(row.workers):>12}{milliseconds(row.threads.median):>11}"
        f"{quartiles(row.threads):>12}{ratio_text(row.speed_up.median):>8}"
        f"{quartiles(row.speed_up, ratio_text):>12}"
    )
