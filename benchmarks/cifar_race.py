"""A race on CIFAR-10: our recipe of the study `cifar-race` beside an airbench-style script.

    python benchmarks/cifar_race.py --data DIR --seeds 20

Each contender is one process that trains one seed per request. The two take turns, so that only one
of them uses the GPU. The first seed of a process is cold: its time is from the start of
the process to the end of the run. Later ones are warm: their seconds are those of training and of
the evaluation with six views. Every seed counts for the mean accuracy. DIR has
`cifar-10-batches-py`; peer_scripts/train_airbench.py is the script.
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
from pathlib import Path
from typing import Any

from common.stats import min_max
from paceline.config import non_default_values
from paceline.measure.machine import hardware
from paceline.study import catalogue
from paceline.study.cells import load

PEER = Path(__file__).parent / "peer_scripts" / "train_airbench.py"


class Contender:
    """A process that trains the seeds of its standard input and prints a line for each."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.accuracies: list[float] = []
        self.cold_seconds = math.nan
        self.warm: list[dict[str, float]] = []
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def train(self, seed: int) -> None:
        began = time.perf_counter()
        is_cold = self._process is None
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed")
        result = json.loads(line)
        print(f"{self.name}: {line.strip()}", file=sys.stderr, flush=True)
        self.accuracies.append(result["accuracy"])
        if is_cold:
            self.cold_seconds = time.perf_counter() - began
        else:
            self.warm.append(result)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def report(self) -> Iterator[str]:
        mean, half = statistics.fmean(self.accuracies), interval(self.accuracies)
        yield self.name
        yield f"  accuracy       {mean:.4f} +- {half:.4f} (95%, n = {len(self.accuracies)})"
        for title, key in (
            ("warm seconds", "seconds"),
            ("training only", "train_seconds"),
            ("whole call", "call_seconds"),
        ):
            if values := [line[key] for line in self.warm if key in line]:
                yield f"  {title:14} {min_max(values, '.3f')} (n = {len(values)})"
        yield f"  cold seconds   {self.cold_seconds:.2f}"


def interval(values: Sequence[float]) -> float:
    """Half of the 95% confidence interval of the mean, from the normal distribution."""
    if len(values) < 2:
        return math.nan
    return 1.96 * statistics.stdev(values) / math.sqrt(len(values))


def train_here(options: argparse.Namespace) -> None:
    """Train the seeds of standard input in this process, and print a line for each."""
    import paceline

    plan = load(catalogue.find("cifar-race"), options.scale)
    recipe = next(config for name, config in plan.configs.items() if "our-recipe" in name)
    settings = {**non_default_values(recipe), "data_dir": str(options.data)}
    if options.precision:
        settings["precision"] = options.precision
    with tempfile.TemporaryDirectory() as out:
        for line in sys.stdin:
            began = time.perf_counter()
            result = paceline.train(**{**settings, "seed": int(line), "out": out})
            spent = time.perf_counter() - began
            print(json.dumps({**figures(result), "call_seconds": spent}), flush=True)


def figures(result: dict[str, Any]) -> dict[str, float]:
    train_seconds = result["history"][-1]["seconds"]
    return {
        "accuracy": result["final"]["test_accuracy"],
        "train_seconds": train_seconds,
        "seconds": train_seconds + result["workers"][0]["phases"]["evaluate"],
        "step_seconds": result["workers"][0]["iteration_seconds"]["median"],
    }


def contenders(options: argparse.Namespace) -> tuple[Contender, Contender]:
    data = ["--data", str(options.data)]
    ours = [sys.executable, __file__, "--here", *data, "--scale", options.scale]
    if options.precision:
        ours += ["--precision", options.precision]
    peer = [sys.executable, str(PEER), *data, "--stdin"]
    if options.compile:
        peer += ["--compile", options.compile]
    return Contender("paceline", ours), Contender("airbench-style script", peer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("PACELINE_DATA"))
    parser.add_argument("--scale", default="real", help="scale of the study (default: real)")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="others than for tuning")
    parser.add_argument("--peer-seeds", type=int, help="seeds of the script (default: --seeds)")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="start no more seeds")
    parser.add_argument("--precision", help="of our recipe, instead of measuring it in each run")
    parser.add_argument("--compile", metavar="MODE", help="compile the script's model")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data: needed without PACELINE_DATA")
    if options.here:
        train_here(options)
        return
    machine = hardware()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {os.getloadavg()[0]:.1f} before")
    began = time.perf_counter()
    ours, peer = contenders(options)
    peer_seeds = options.seeds if options.peer_seeds is None else options.peer_seeds
    try:
        for number in range(max(options.seeds, peer_seeds)):
            for contender, seeds in ((ours, options.seeds), (peer, peer_seeds)):
                is_late = time.perf_counter() - began > options.limit_seconds
                if number < seeds and not is_late:
                    contender.train(options.first_seed + number)
    finally:
        ours.stop()
        peer.stop()
    for contender in (ours, peer):
        if contender.accuracies:
            print("\n".join(contender.report()))
    if ours.warm and peer.warm:
        medians = [statistics.median(line["seconds"] for line in one.warm) for one in (ours, peer)]
        print(f"warm seconds, ratio of medians: {medians[0] / medians[1]:.3f}")


if __name__ == "__main__":
    main()
