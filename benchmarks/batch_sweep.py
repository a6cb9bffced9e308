"""Whether the advised batch size reaches a loss about as fast as the best one of a sweep.

    python benchmarks/batch_sweep.py [--data digits,mnist] [--batches 16,32,...,2048] [--seeds 3]
                                     [--rules noise,linear] [--out batch_sweep]

The advice of `paceline plan` is made from one run with batch size 64, which measures the gradient
noise scale on its way to the target loss, and from the short runs in which `paceline plan` measures
step times. Then runs with every batch size and seed train to the target, with the learning rate
scaled by the advised rule, and for comparison in proportion to the batch size. Time to target is
the number of steps, interpolated between evaluations, times the median step time with that batch
size over all seeds, so that evaluations and a busy machine matter little.

Two workers of one thread each train side by side with other runs, each run on its own pair of
cores. Results are appended to OUT/results.jsonl; what is there is not run again. With --print, only
the tables are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.stats import min_max
from paceline.analysis.branched_check import samples_to
from paceline.analysis.events import read_iterations
from paceline.analysis.run import Run, open_run
from paceline.errors import PacelineError
from paceline.measure.machine import hardware, software
from paceline.measure.noise_scale import learning_rate_factor
from paceline.plan.advice import Advice, advise
from paceline.plan.calibration import Calibration
from paceline.plan.prediction import Predictor
from paceline.plan.run_calibration import calibrate
from paceline.plan.target import Target
from paceline.records import noise_scale_text

BASE_BATCH = 64
BASE_RATE = 0.01
"""The default of `paceline train`; momentum is 0.9."""
TARGETS = {"digits": 0.35, "mnist": 0.08}
"""Test loss; about 90% and 97.5% of the images are classified correctly."""
STRATEGY = "allreduce"
PLANNED_BATCH = 256
EVALUATIONS = 25
"""On the expected way to the target."""
TEST_SAMPLES = 4000
MOST_TIMES = 3
"""A run ends without the target after this many times the expected steps."""
RUN_SECONDS = 120


@dataclass(frozen=True)
class Result:
    """A run of the sweep."""

    data: str
    rule: str
    batch: int
    seed: int
    learning_rate: float
    steps: float | None
    """To the target; None if it was not reached."""
    step_seconds: float
    """Median."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="digits,mnist")
    parser.add_argument("--batches", default="16,32,64,128,256,512,1024,2048")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", default="noise,linear")
    parser.add_argument("--out", type=Path, default=Path("batch_sweep"))
    parser.add_argument("--print", action="store_true", dest="is_printed_only")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.data.split(",")
    if not options.is_printed_only:
        batches = [int(each) for each in options.batches.split(",")]
        run_all([job for name in names for job in measurements(name, options.out)])
        jobs = [
            job
            for rule in options.rules.split(",")
            for seed in range(options.seeds)
            for name in names
            for job in sweep(name, rule, batches, seed, options.out)
        ]
        run_all(jobs)
    for name in names:
        show(name, options.out)


def run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Run jobs side by side, each on its own pair of cores."""
    cores = sorted(os.sched_getaffinity(0))
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work(pair: Iterable[int]) -> None:
        # Of this thread, and of the processes that it starts.
        os.sched_setaffinity(0, pair)
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                job()
            except (OSError, subprocess.SubprocessError, PacelineError) as error:
                print(f"a run failed: {error!r}", file=sys.stderr, flush=True)

    pairs = [cores[start : start + 2] for start in range(0, max(1, len(cores) - 1), 2)]
    threads = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measurements(data: str, out: Path) -> list[Callable[[], None]]:
    """The run with the default batch size, and the short runs of a plan."""

    def base() -> None:
        train(
            data, BASE_BATCH, BASE_RATE, 0, 20, 20_000, base_folder(data, out), "--noise-every", "5"
        )

    def plan() -> None:
        folder = out / f"plan-{data}"
        shutil.rmtree(folder, ignore_errors=True)
        paceline(
            "plan", "--model", "lenet", "--data", data, "--threads", "1", "--strategy", STRATEGY,
            "--batch-size", str(PLANNED_BATCH), "--workers", "2", "--out", str(folder),
            "--json", str(out / f"plan-{data}.json"),
        )  # fmt: skip

    jobs = [] if (base_folder(data, out) / "result.json").exists() else [base]
    return jobs + ([] if (out / f"plan-{data}.json").exists() else [plan])


def sweep(
    data: str, rule: str, batches: Sequence[int], seed: int, out: Path
) -> list[Callable[[], None]]:
    learning = calibration_of(data, out).learning
    assert learning is not None
    base_steps = learning.steps or 0
    done = {(one.data, one.rule, one.batch, one.seed) for one in read_results(out)}

    def job(batch: int) -> None:
        scale = learning.noise_scale if rule == "noise" else float("inf")
        rate = BASE_RATE * learning_rate_factor(batch, BASE_BATCH, scale, "sgd")
        expected = base_steps * learning.relative_steps(batch)
        folder = out / f"{data}-{rule}-{batch}-{seed}"
        every, most = max(1, round(expected / EVALUATIONS)), round(MOST_TIMES * expected)
        steps, step_seconds = None, float("nan")
        try:
            run = train(data, batch, rate, seed, every, most, folder, "--noise-every", "never")
            steps, step_seconds = steps_to_target(run, TARGETS[data]), median_step(run)
        except subprocess.CalledProcessError:
            pass  # diverged
        result = Result(data, rule, batch, seed, rate, steps, step_seconds)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        shutil.rmtree(folder)

    return [
        lambda batch=batch: job(batch)  # type: ignore[misc]
        for batch in sorted(batches, reverse=True)
        if (data, rule, batch, seed) not in done
        # Both rules have the same rate with the batch size of the run.
        and not (rule != "noise" and batch == BASE_BATCH)
    ]


def train(
    data: str, batch: int, rate: float, seed: int, every: int, steps: int, out: Path, *more: str
) -> Run:
    """Train to the target; a folder of an interrupted run is replaced."""
    shutil.rmtree(out, ignore_errors=True)
    paceline(
        "train", "--model", "lenet", "--data", data, "--strategy", STRATEGY, "--threads", "1",
        "--nproc-per-node", "2", "--batch-size", str(batch), "--lr", str(rate), "--seed", str(seed),
        "--target-loss", str(TARGETS[data]), "--eval-every", str(every), "--iterations", str(steps),
        "--test-samples", str(TEST_SAMPLES), "--out", str(out.parent), "--name", out.name, *more,
    )  # fmt: skip
    return open_run(out)


def paceline(*arguments: str) -> None:
    command = [sys.executable, "-m", "paceline", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RUN_SECONDS
    )
    if done.returncode:
        print(f"{' '.join(command)}\n{done.stdout[-2000:]}", file=sys.stderr, flush=True)
        done.check_returncode()


def steps_to_target(run: Run, target: float) -> float | None:
    """Interpolated between the evaluations before and after."""
    points = [(one["iteration"], one["test_loss"]) for one in run.history if one["test_loss"]]
    if not points or points[-1][1] > target:
        return None
    steps, losses = zip(*points, strict=True)
    return samples_to(target, np.array(steps, dtype=float), np.array(losses))


def median_step(run: Run) -> float:
    return float(np.median(read_iterations(run.folder.events_file(0)).seconds[1:]))


def base_folder(data: str, out: Path) -> Path:
    return out / f"base-{data}"


def calibration_of(data: str, out: Path) -> Calibration:
    """What `paceline plan plan-DATA base-DATA` plans from."""
    return calibrate([str(out / f"plan-{data}"), str(base_folder(data, out))])


def advice_of(calibration: Calibration) -> Advice:
    return advise(calibration, [Target(STRATEGY, 2, BASE_BATCH)])


def read_results(out: Path) -> list[Result]:
    file = out / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def show(data: str, out: Path) -> None:
    calibration = calibration_of(data, out)
    calibration.write(out / f"calibration-{data}.json")
    learning, advice = calibration.learning, advice_of(calibration)
    assert learning is not None
    assert advice.batch is not None
    advised, base_steps = advice.batch.batch_size, learning.steps or 0
    print(f"\n{data} to a test loss of {TARGETS[data]}: {hardware()['cpu']}", end="")
    print(f", {os.cpu_count()} cores, torch {software()['torch']}")
    noise = {**learning.to_dict(), "value": learning.noise_scale, "batch": learning.batch_size}
    low, high = advice.batch.batch_range
    print(f"noise scale {noise_scale_text(noise)}")
    print(f"advised batch {advised}, by the ends of the interval {low} to {high}")
    results = [one for one in read_results(out) if one.data == data]
    times: dict[tuple[str, int], float] = {}
    print(f"{'rule':<8}{'batch':>6}{'rate':>9}{'steps':>24}{'predicted':>10}", end="")
    print(f"{'step, ms':>24}{'predicted':>10}{'time to target, s':>24}")
    predictor = Predictor(calibration)
    for rule, batch in sorted({(one.rule, one.batch) for one in results}, reverse=True):
        same = [one for one in results if (one.rule, one.batch) == (rule, batch)]
        steps = [one.steps for one in same if one.steps is not None]
        seconds = statistics.median(one.step_seconds for one in same)
        print(f"{rule:<8}{batch:>6}{same[0].learning_rate:>9.4f}", end="")
        if len(steps) < len(same):
            print(f"{f'{len(same) - len(steps)} of {len(same)} never':>24}")
            continue
        times[rule, batch] = statistics.median(steps) * seconds
        predicted = predictor.predict(Target(STRATEGY, 2, batch)).step_seconds.median
        print(f"{min_max(steps, '.0f'):>24}", end="")
        print(f"{base_steps * learning.relative_steps(batch):>10.0f}", end="")
        print(f"{min_max((1e3 * one.step_seconds for one in same), '.1f'):>24}", end="")
        print(f"{1e3 * predicted:>10.1f}{min_max(each * seconds for each in steps):>24}")
    for rules in (["noise"], ["noise", "linear"]):
        chosen = {key: time for key, time in times.items() if key[0] in rules}
        if ("noise", advised) in chosen:
            best = min(chosen, key=chosen.__getitem__)
            ratio = chosen["noise", advised] / chosen[best]
            print(f"advised / best of {' and '.join(rules)}: {ratio:.2f} (best: {best})")


if __name__ == "__main__":
    main()
