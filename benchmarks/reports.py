"""Time and memory of a report: for 1,000 runs, and for a million iterations.

    python benchmarks/reports.py [--runs 1000] [--iterations 1000000] [--folder DIR]

The records are synthetic. Each report is built by a separate process, as from the command line; its
time includes starting Python, its memory is the peak of the process. The list of the live page is
requested as soon as the server answers: the first request reads every run, the second only changes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, from_mapping
from paceline.measure.machine import hardware, software
from paceline.records import PHASES, SCHEMA, TRAFFIC_KINDS, RunFolder

BLOCK = 100
STRATEGIES = ("overlap", "ring", "tree", "gather_scatter", "ddp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keep the records here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        print(f"{hardware()['cpu']}, {hardware()['cores']} cores; {software()}")
        many, long = root / "many", root / "long"
        if not many.exists():
            for number in range(arguments.runs):
                write(many, f"run-{number:04}", number, iterations=100)
        measure(f"{arguments.runs:,} runs of 100 iterations", many)
        measure_list(many)
        if not long.exists():
            write(long, "run", 0, iterations=arguments.iterations)
        measure(f"2 workers, {arguments.iterations:,} iterations each", long)


def measure(what: str, folder: Path) -> None:
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "paceline", "report", str(folder)],
                               stdout=subprocess.DEVNULL)  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"paceline report {folder} ended with status {status}")
    size = (folder / "report.html").stat().st_size
    print(
        f"{what}: {seconds:.2f} s ({used.ru_utime + used.ru_stime:.2f} s of CPU), peak"
        f" {used.ru_maxrss / 1000:.0f} MB, page {size / 1e6:.2f} MB"
    )


def measure_list(folder: Path) -> None:
    command = [sys.executable, "-m", "paceline", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            address = server.stdout.readline().split()[0]
            urllib.request.urlopen(f"{address}page/list.js", timeout=60).read()
            seconds = []
            for _ in range(2):
                begin = time.perf_counter()
                entries = json.load(urllib.request.urlopen(f"{address}runs", timeout=60))
                seconds.append(time.perf_counter() - begin)
        finally:
            server.terminate()
    print(
        f"the list of the live page, {len(entries):,} runs: {seconds[0]:.2f} s at first,"
        f" {seconds[1]:.2f} s again"
    )


def write(root: Path, name: str, number: int, iterations: int) -> None:
    """Four repeats of each configuration: 250 configurations for 1,000 runs."""
    strategy = STRATEGIES[number // 4 % len(STRATEGIES)]
    rate = 0.001 * (1 + number // (4 * len(STRATEGIES)))
    config = from_mapping(
        {"strategy": strategy, "lr": rate, "seed": number % 4, "nproc_per_node": 2,
         "iterations": iterations, "out": str(root), "name": name}
    )  # fmt: skip
    folder = RunFolder.create(config)
    generator = random.Random(number)
    totals = [write_events(folder, rank, iterations, generator) for rank in range(2)]
    samples = [
        {"node": 0, "started": 0.0, "time": 0.5 * index, "seconds": 0.5 * index,
         "cpu_percent": 150.0 + generator.random(), "rss_bytes": 10**9,
         "network_bytes_sent": 1000 * index, "network_bytes_received": 1000 * index}
        for index in range(max(20, iterations // 200))
    ]  # fmt: skip
    folder.resources_file(0).write_text("".join(json.dumps(one) + "\n" for one in samples))
    folder.result_file.write_text(json.dumps(result(folder, config, totals)))


def write_events(folder: RunFolder, rank: int, iterations: int, generator: random.Random) -> float:
    """Return the seconds of all iterations."""
    total = 0.0
    with folder.events_file(rank).open("w") as file:
        for first in range(0, iterations, BLOCK):
            count = min(BLOCK, iterations - first)
            seconds = [round(0.01 + 0.002 * generator.random(), 7) for _ in range(count)]
            losses = [2.3 / (1 + (first + index) / 1000) + 0.1 * generator.random()
                      for index in range(count)]  # fmt: skip
            total += sum(seconds)
            event = {"event": "iterations", "time": total, "first": first, "seconds": seconds,
                     "loss": losses, "learning_rate": 0.01}  # fmt: skip
            file.write(json.dumps(event) + "\n")
        end = {"event": "end", "time": total, "status": "finished", "cause": None}
        file.write(json.dumps(end) + "\n")
    return total


def result(folder: RunFolder, config: RunConfig, totals: list[float]) -> dict[str, Any]:
    iterations = config.iterations or 0
    shares = {"forward": 0.4, "backward": 0.4, "exchange": 0.15, "wait": 0.05}
    workers = []
    for rank, total in enumerate(totals):
        count = {"bytes_sent": 1000 * iterations, "bytes_received": 1000 * iterations,
                 "messages": iterations, "seconds": 0.15 * total}  # fmt: skip
        mean = total / iterations
        workers.append(
            {
                "rank": rank, "node": 0, "samples": 32 * iterations, "wall_seconds": total,
                "iteration_seconds": {"first": mean, "mean": mean, "median": mean, "p95": mean},
                "phases": {phase: shares.get(phase, 0.0) * total for phase in PHASES},
                "hidden_exchange_seconds": 0.0,
                "traffic": {kind: dict(count) for kind in TRAFFIC_KINDS},
            }
        )  # fmt: skip
    history = [
        {"iteration": iterations * part // 20, "epoch": float(part), "test_loss": 2.0 / part,
         "seconds": totals[0] * part / 20, "test_accuracy": 0.04 * part}
        for part in range(1, 21)
    ]  # fmt: skip
    return {
        "schema": SCHEMA, "id": folder.id, "status": "finished", "cause": None,
        "config": config.to_dict(), "software": software(), "hardware": hardware(),
        "wall_seconds": max(totals), "iterations": iterations, "samples": 64 * iterations,
        "weights_sha256": None, "seconds_to_target": None,
        "final": {"train_loss": 0.1, "test_loss": 0.1, "test_accuracy": 0.8},
        "history": history, "workers": workers,
        "nodes": [{"node": 0, "cpu_percent_mean": 150.0, "rss_bytes_mean": 10**9,
                   "rss_bytes_peak": 10**9, "pss_bytes_peak": 10**9, "network_bytes_sent": 1000,
                   "network_bytes_received": 1000, "gpus": []}],
        "checkpoints": {"count": 0, "bytes": 0, "blocked_seconds": 0.0},
        "measurement_overhead": {"fraction": 0.001}, "warnings": [],
    }  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
