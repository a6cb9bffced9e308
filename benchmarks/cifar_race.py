"""A race on CIFAR-10: our recipe of the study `cifar-race` beside an airbench-style script.

    python benchmarks/cifar_race.py --data DIR --blocks 4 --seeds 5

Each block runs both contenders, twice: cold, as a new process from its start to its end, and warm,
as one process that trains a first seed as a warm-up and then `--seeds` others. Warm seconds are
those of training and of the evaluation with six views. Every run counts for the mean accuracy. DIR
has `cifar-10-batches-py`; peer_scripts/train_airbench.py is the script.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.stats import min_max
from paceline.config import RunConfig, non_default_values, to_argv
from paceline.measure.machine import hardware
from paceline.study import catalogue
from paceline.study.cells import load

PEER = Path(__file__).parent / "peer_scripts" / "train_airbench.py"
LIMIT_SECONDS = 600.0


@dataclass
class Measured:
    """What one contender reached."""

    accuracies: list[float] = field(default_factory=list)
    warm_seconds: list[float] = field(default_factory=list)
    train_seconds: list[float] = field(default_factory=list)
    call_seconds: list[float] = field(default_factory=list)
    """Of a whole run in a warm process, with its data and its records."""
    cold_seconds: list[float] = field(default_factory=list)


def recipe(scale: str) -> RunConfig:
    """Our recipe, as the study runs it."""
    plan = load(catalogue.find("cifar-race"), scale)
    return next(config for name, config in plan.configs.items() if "our-recipe" in name)


def settings(options: argparse.Namespace, seed: int, out: str) -> dict[str, Any]:
    own = dict(non_default_values(recipe(options.scale)))
    return {**own, "seed": seed, "data_dir": str(options.data), "out": out, "name": f"seed-{seed}"}


def train_here(options: argparse.Namespace) -> None:
    """Train seeds one after another in this process, and print a line for each."""
    import paceline

    with tempfile.TemporaryDirectory() as out:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            began = time.perf_counter()
            result = paceline.train(**settings(options, seed, out))
            spent = time.perf_counter() - began
            print(json.dumps({**figures(result), "call_seconds": spent}), flush=True)


def figures(result: dict[str, Any]) -> dict[str, float]:
    train_seconds = result["history"][-1]["seconds"]
    return {
        "accuracy": result["final"]["test_accuracy"],
        "train_seconds": train_seconds,
        "seconds": train_seconds + result["workers"][0]["phases"]["evaluate"],
    }


def run(command: Sequence[str]) -> tuple[list[dict[str, float]], float]:
    """The lines that a command prints, and its seconds from start to end."""
    began = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_SECONDS
    )
    spent = time.perf_counter() - began
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"], spent


def ours_cold(options: argparse.Namespace, seed: int) -> tuple[list[dict[str, float]], float]:
    with tempfile.TemporaryDirectory() as out:
        argv = to_argv(settings(options, seed, out))
        command = [sys.executable, "-m", "paceline", "train", "--quiet", *argv]
        _, spent = run(command)
        result = json.loads((Path(out) / f"seed-{seed}" / "result.json").read_text())
    return [figures(result)], spent


def ours_warm(options: argparse.Namespace, seed: int) -> tuple[list[dict[str, float]], float]:
    own = ["--data", str(options.data), "--scale", options.scale, "--first-seed", str(seed)]
    return run([sys.executable, __file__, "--here", *own, "--seeds", str(options.seeds + 1)])


def peer(
    options: argparse.Namespace, seed: int, seeds: int
) -> tuple[list[dict[str, float]], float]:
    own = ["--data", str(options.data), "--first-seed", str(seed), "--seeds", str(seeds)]
    if options.compile:
        own += ["--compile", options.compile]
    return run([sys.executable, str(PEER), *own])


def measure(options: argparse.Namespace) -> dict[str, Measured]:
    found = {"paceline": Measured(), "airbench-style script": Measured()}
    seeds_per_block = options.seeds + 2
    for block in range(options.blocks):
        first = block * seeds_per_block
        runs: list[tuple[str, bool, Any]] = [
            ("paceline", True, lambda first=first: ours_cold(options, first)),
            ("airbench-style script", True, lambda first=first: peer(options, first, 1)),
            ("paceline", False, lambda first=first: ours_warm(options, first + 1)),
            (
                "airbench-style script",
                False,
                lambda first=first: peer(options, first + 1, options.seeds + 1),
            ),
        ]
        # The other order in every other block.
        for name, is_cold, start in runs if block % 2 == 0 else reversed(runs):
            lines, spent = start()
            one = found[name]
            one.accuracies += [line["accuracy"] for line in lines]
            if is_cold:
                one.cold_seconds.append(spent)
                continue
            one.warm_seconds += [line["seconds"] for line in lines[1:]]
            one.train_seconds += [line["train_seconds"] for line in lines[1:]]
            one.call_seconds += [line.get("call_seconds", math.nan) for line in lines[1:]]
        print(f"block {block + 1} of {options.blocks} done", file=sys.stderr, flush=True)
    return found


def interval(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean, from the normal distribution."""
    if len(values) < 2:
        return math.nan
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def report(found: dict[str, Measured]) -> Iterator[str]:
    for name, one in found.items():
        mean, spread = statistics.fmean(one.accuracies), interval(one.accuracies)
        yield f"{name}"
        yield f"  accuracy       {mean:.4f} +- {spread:.4f} (n = {len(one.accuracies)})"
        yield f"  warm seconds   {min_max(one.warm_seconds, '.3f')} (n = {len(one.warm_seconds)})"
        yield f"  training only  {min_max(one.train_seconds, '.3f')}"
        if not any(map(math.isnan, one.call_seconds)):
            yield f"  whole call     {min_max(one.call_seconds, '.3f')}"
        yield f"  cold seconds   {min_max(one.cold_seconds, '.2f')} (n = {len(one.cold_seconds)})"
    ours, theirs = found.values()
    for kind in ("warm_seconds", "cold_seconds"):
        ratio = statistics.median(getattr(ours, kind)) / statistics.median(getattr(theirs, kind))
        yield f"ratio of medians, {kind.replace('_', ' ')}: {ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("PACELINE_DATA"))
    parser.add_argument("--scale", default="real", help="scale of the study (default: real)")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5, help="warm seeds of a block (default: 5)")
    parser.add_argument("--compile", metavar="MODE", help="compile the script's model")
    parser.add_argument("--first-seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data: needed without PACELINE_DATA")
    if options.here:
        train_here(options)
        return
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {os.getloadavg()[0]:.1f} before")
    for line in report(measure(options)):
        print(line)


if __name__ == "__main__":
    main()
