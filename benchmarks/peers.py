"""paceline beside its peers, on the workers of one machine.

    python benchmarks/peers.py --setup DIR          make DIR, an environment that has the peers
    DIR/bin/python benchmarks/peers.py [--quick]    measure

Parts, for --only: `iteration` (an update with every peer), `collective` (the all-reduce by size),
`threads` (two workers or two threads), `memory` (of four workers), `scripts` (unchanged scripts of
other libraries with paceline's backend). docs/peers.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.measure.machine import hardware
from peer_comparison.collective import SIZES_BYTES, compare_collectives
from peer_comparison.environment import set_up, versions
from peer_comparison.group import CONTENDERS, Fleet
from peer_comparison.iteration import TASKS, Task, compare_iterations
from peer_comparison.memory import compare_memory
from peer_comparison.rounds import LeftOut, Length
from peer_comparison.threads import MODELS as THREADS_MODELS
from peer_comparison.threads import WORKERS as THREADS_WORKERS
from peer_comparison.threads import compare_threads
from peer_comparison.unchanged_scripts import compare_scripts

PARTS = ("iteration", "collective", "threads", "memory", "scripts")
QUICK_VGG_BATCH = 8
QUICK_SIZES_BYTES = [size for size in SIZES_BYTES if size <= 37 * 2**20]


def main() -> None:
    given = arguments()
    if given.setup is not None:
        set_up(given.setup)
        return
    began = monotonic()
    left_out = LeftOut()
    tasks = chosen_tasks(given.models, given.quick)
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {os.getloadavg()[0]:.1f} before")
    installed = [f"{name} {version}" for name, version in versions().items() if version]
    print(textwrap.fill(", ".join(installed), 79))
    print("One thread a worker, SGD with momentum, data resident; contenders take turns in")
    print("short blocks: medians and quartiles over the blocks, ratios of neighbours.")
    results: dict[str, Any] = {"machine": machine, "versions": versions()}
    measure_teams(given, tasks, left_out, results)
    if "memory" in given.only:
        vgg = [task for task in tasks if task.model == "vgg11"] or tasks[-1:]
        order = ["ddp", *(name for name in CONTENDERS if name != "ddp")]
        results["memory"] = compare_memory(order, vgg[0], left_out)
    if "scripts" in given.only:
        repeats = 2 if given.quick else 5
        results["scripts"] = compare_scripts(min(given.workers), repeats, left_out)
    show_foot(left_out, monotonic() - began)
    results["left_out"], results["seconds"] = left_out.lines(), monotonic() - began
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short blocks and few of them")
    parser.add_argument("--only", type=words, default=list(PARTS), metavar="PART,...")
    parser.add_argument("--models", type=words, default=list(TASKS), metavar="MODEL,...")
    parser.add_argument("--workers", type=numbers, default=[2, 4], metavar="N,...")
    parser.add_argument("--repeats", type=int, help="the most blocks of each contender (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures")
    parser.add_argument(
        "--setup", type=Path, metavar="DIR", help="install the peers there, no more"
    )
    given = parser.parse_args()
    for name, known, values in (("only", PARTS, given.only), ("models", TASKS, given.models)):
        unknown = [value for value in values if value not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]} is none of {', '.join(known)}")
    return given


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def chosen_tasks(models: list[str], quick: bool) -> list[Task]:
    tasks = [TASKS[model] for model in models]
    if not quick:
        return tasks
    return [
        replace(task, batch_per_worker=QUICK_VGG_BATCH) if task.model == "vgg11" else task
        for task in tasks
    ]


def measure_teams(
    given: argparse.Namespace, tasks: list[Task], left_out: LeftOut, results: dict[str, Any]
) -> None:
    """The parts in which long-lived workers take turns, for each number of workers."""
    fewest, most = (3, given.repeats or 3) if given.quick else (5, given.repeats or 9)
    training = Length(0.2 if given.quick else 0.4, 10.0 if given.quick else 30.0, fewest, most)
    summing = Length(0.05, 2.0 if given.quick else 8.0, fewest, most)
    sizes = QUICK_SIZES_BYTES if given.quick else SIZES_BYTES
    for world_size in given.workers:
        with closing(Fleet(world_size, left_out)) as fleet:
            if "iteration" in given.only:
                for task in tasks:
                    results.setdefault("iteration", []).append(
                        compare_iterations(fleet, task, training)
                    )
            if "collective" in given.only:
                results.setdefault("collective", []).append(
                    compare_collectives(fleet, sizes, summing)
                )
            if "threads" in given.only and world_size == THREADS_WORKERS:
                small = [task for task in tasks if task.model in THREADS_MODELS]
                results["threads"] = compare_threads(fleet, small, training)


def show_foot(left_out: LeftOut, seconds: float) -> None:
    print(f"\nmeasured in {seconds / 60:.1f} minutes")
    for line in left_out.lines():
        print(textwrap.fill(f"left out: {line}", 79, subsequent_indent="  "))


if __name__ == "__main__":
    # Workers are ended on the way out, also when a time limit sends this signal.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
