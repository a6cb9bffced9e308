"""How much of the link `overlap` uses while it communicates, and its pace against DDP's.

    python benchmarks/overlap_link.py [--repeats 3] [--iterations 12] [--batch-per-worker 16]

`vgg11` on four emulated nodes with half a core each at 1 Gbit/s (needs root; on a machine with
nothing else to do); `overlap` and `ddp` take turns. The k-th bucket of an iteration is under way
from the moment at which the last worker has it until the last worker is done with it; its rate is
what a worker sent of gradients in that time, against the link as it was measured when the cluster
came up. Times of an iteration are medians over iterations, of the slowest worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLUSTER = "nodes=4,cpus=0.5,bandwidth=1gbit"
TRACED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--batch-per-worker", type=int, default=16)
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {"overlap": [], "ddp": []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats):
            for strategy, times in seconds.items():
                run = train(Path(folder), f"{strategy}-{repeat}", strategy, given)
                result = json.loads((run / "result.json").read_text())
                medians = [one["iteration_seconds"]["median"] for one in result["workers"]]
                times.append(max(medians))
                line = f"{strategy:8} {max(medians):6.3f} s an iteration"
                if strategy == "overlap":
                    rate = gradient_rate(run)
                    link = measured_link(result)
                    shares.append(rate / link)
                    line += f"; {rate / 1e6:5.0f} of {link / 1e6:.0f} Mbit/s: {rate / link:.1%}"
                print(line, flush=True)
    ratios = [ddp / own for ddp, own in zip(seconds["ddp"], seconds["overlap"], strict=True)]
    print(f"share of the link   {spread(shares)}   (aim: 0.90 and more)")
    print(f"ddp / overlap       {spread(ratios)}   (aim: 1.00 and more)")


def train(out: Path, name: str, strategy: str, given: argparse.Namespace) -> Path:
    command = "train --quiet --model vgg11 --data digits --train-samples 2048 --test-samples 64"
    command += f" --iterations {given.iterations} --eval-every never --threads 1 --device cpu"
    command += f" --batch-per-worker {given.batch_per_worker} --trace {TRACED}"
    command += f" --strategy {strategy} --cluster {CLUSTER} --out {out} --name {name}"
    subprocess.run(
        [sys.executable, "-m", "paceline", *command.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=900,
    )
    return out / name


def gradient_rate(run: Path) -> float:
    """Bits that a worker sent in a second of communication, over the traced iterations."""
    by_rank = [transfers(json.loads(path.read_text())) for path in sorted(run.glob("trace-*.json"))]
    under_way = []
    for same in zip(*by_rank, strict=True):
        begin = max(began for began, _, _ in same)
        under_way.append((begin, max(ended for _, ended, _ in same)))
    sent_bytes = sum(size for _, _, size in by_rank[0])
    return 8 * sent_bytes / covered_seconds(under_way)


def transfers(trace: dict[str, Any]) -> list[tuple[float, float, int]]:
    """Begin and end of each exchange of gradients by the first worker's clock, and its bytes."""
    zero = trace["began_seconds"]
    return [
        (
            zero + event["ts"] / 1e6,
            zero + (event["ts"] + event["dur"]) / 1e6,
            event["args"]["bytes_sent"],
        )
        for event in sorted(trace["traceEvents"], key=lambda one: one.get("ts", 0))
        if event.get("cat") == "transfer" and event["args"]["kind"] == "gradients"
    ]


def covered_seconds(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def measured_link(result: dict[str, Any]) -> float:
    """Bits a second of the slowest node's link, as the cluster measured it when it came up."""
    got = result["cluster"]["got"]
    return min(float(one["got"]) for one in got if one["what"].startswith("bandwidth"))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
