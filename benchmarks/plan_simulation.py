"""Time and memory of simulating one step of a large cluster: python benchmarks/plan_simulation.py

Each strategy runs in its own process: 10,000 workers with different compute times, in racks of 40
with an uplink of a quarter of their bandwidth, and 60 tensors of 25 MB in total.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from time import perf_counter

import numpy as np

from paceline.plan.calibration import Gradient
from paceline.plan.cluster_simulation import Racks, VectorizedCollectives, simulate_cluster_step
from paceline.plan.collective_cost import NO_TIME, RoundTimes
from paceline.plan.job import Compute, Job

STRATEGIES = (
    "gather_scatter", "allreduce", "ring", "tree", "halving_doubling", "overlap", "ddp", "sharded",
)  # fmt: skip
TENSORS = 60
TENSOR_BYTES = 25_000_000 // TENSORS


def simulate(strategy: str, workers: int) -> None:
    gradients = [Gradient(TENSOR_BYTES, 1 - index / TENSORS) for index in range(TENSORS)]
    job = Job(
        strategy, {}, workers, workers, gradients, 0, Compute(0.001, 0.03, 0.06, 0.004),
        lambda *_: NO_TIME,
    )  # fmt: skip
    times = RoundTimes(100e-6, 1 / 1.25e9)
    factors = np.random.default_rng(0).lognormal(0.0, 0.1, workers)
    began = perf_counter()
    collectives = VectorizedCollectives(lambda *_: times, Racks(40, 4.0))
    step = simulate_cluster_step(job, factors, collectives).max()
    spent = perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{strategy:18}{spent:10.2f} s{peak:10.0f} MiB{step:12.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--strategy", choices=STRATEGIES, help="only this one, in this process")
    options = parser.parse_args()
    if options.strategy:
        simulate(options.strategy, options.workers)
        return
    print(f"{'strategy':18}{'simulated in':>12}{'memory':>14}{'step':>14}", flush=True)
    for strategy in STRATEGIES:
        command = [sys.executable, __file__, "--workers", str(options.workers)]
        subprocess.run([*command, "--strategy", strategy], check=True)


if __name__ == "__main__":
    main()
