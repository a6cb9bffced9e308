"""Compare paceline with other libraries on one machine.

    python benchmarks/peers.py --setup DIR          create an environment with the peers
    DIR/bin/python benchmarks/peers.py [--quick]    measure

Parts, for --only: `iteration` (update time with every peer), `collective` (all-reduce by size),
`threads` (two workers or two threads), `memory` (four workers), `scripts` (unchanged scripts of
other libraries with paceline's backend). docs/peers.md explains the tables.
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
from peer_comparison.rounds import Length, Skipped
from peer_comparison.threads import MODELS as THREADS_MODELS
from peer_comparison.threads import WORKERS as THREADS_WORKERS
from peer_comparison.threads import compare_threads
from peer_comparison.unchanged_scripts import compare_scripts

PARTS = ("iteration", "collective", "threads", "memory", "scripts")
QUICK_VGG_BATCH = 8
QUICK_SIZES_BYTES = [size for size in SIZES_BYTES if size <= 37 * 2**20]


def main() -> None:
    options = arguments()
    if options.setup is not None:
        set_up(options.setup)
        return
    began = monotonic()
    skipped = Skipped()
    tasks = chosen_tasks(options.models, options.quick)
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {os.getloadavg()[0]:.1f} before")
    installed = [f"{name} {version}" for name, version in versions().items() if version]
    print(textwrap.fill(", ".join(installed), 79))
    print("One thread per worker, SGD with momentum, resident data; contenders interleaved")
    print("in short blocks: median and quartiles over blocks, ratios of adjacent blocks.")
    results: dict[str, Any] = {"machine": machine, "versions": versions()}
    measure_teams(options, tasks, skipped, results)
    if "memory" in options.only:
        vgg = [task for task in tasks if task.model == "vgg11"] or tasks[-1:]
        order = ["ddp", *(name for name in CONTENDERS if name != "ddp")]
        results["memory"] = compare_memory(order, vgg[0], skipped)
    if "scripts" in options.only:
        repeats = 2 if options.quick else 5
        results["scripts"] = compare_scripts(min(options.workers), repeats, skipped)
    show_foot(skipped, monotonic() - began)
    results["left_out"], results["seconds"] = skipped.lines(), monotonic() - began
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few, short blocks")
    parser.add_argument("--only", type=comma_separated, default=list(PARTS), metavar="PART,...")
    parser.add_argument("--models", type=comma_separated, default=list(TASKS), metavar="MODEL,...")
    parser.add_argument("--workers", type=numbers, default=[2, 4], metavar="N,...")
    parser.add_argument("--repeats", type=int, help="maximum number of blocks per contender (9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--setup", type=Path, metavar="DIR", help="install the peers there and exit"
    )
    options = parser.parse_args()
    for name, known, values in (("only", PARTS, options.only), ("models", TASKS, options.models)):
        unknown = [value for value in values if value not in known]
        if unknown:
            parser.error(f"--{name}: {unknown[0]} is not one of {', '.join(known)}")
    return options


def comma_separated(text: str) -> list[str]:
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
    options: argparse.Namespace, tasks: list[Task], skipped: Skipped, results: dict[str, Any]
) -> None:
    """Run the parts that use long-lived workers, for each world size."""
    fewest, most = (3, options.repeats or 3) if options.quick else (5, options.repeats or 9)
    training = Length(0.2 if options.quick else 0.4, 10.0 if options.quick else 30.0, fewest, most)
    summing = Length(0.05, 2.0 if options.quick else 8.0, fewest, most)
    sizes = QUICK_SIZES_BYTES if options.quick else SIZES_BYTES
    for world_size in options.workers:
        with closing(Fleet(world_size, skipped)) as fleet:
            if "iteration" in options.only:
                for task in tasks:
                    results.setdefault("iteration", []).append(
                        compare_iterations(fleet, task, training)
                    )
            if "collective" in options.only:
                results.setdefault("collective", []).append(
                    compare_collectives(fleet, sizes, summing)
                )
            if "threads" in options.only and world_size == THREADS_WORKERS:
                small = [task for task in tasks if task.model in THREADS_MODELS]
                results["threads"] = compare_threads(fleet, small, training)


def show_foot(skipped: Skipped, seconds: float) -> None:
    print(f"\nmeasured in {seconds / 60:.1f} minutes")
    for line in skipped.lines():
        print(textwrap.fill(f"skipped: {line}", 79, subsequent_indent="  "))


if __name__ == "__main__":
    # `main` terminates its workers on exit, which a plain SIGTERM would skip.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
