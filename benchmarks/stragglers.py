"""Cost of a straggler, and what helps: asynchronous parameter servers, shards by speed.

    python benchmarks/stragglers.py [--quick] [--repeats N] [--only NAME]

Two workers train lenet on digits, always on the same samples. The cases of a question are
interleaved over its repeats; figures are medians (min-max).

- `servers`: one worker is four times slower. How much sooner do async and bounded finish than sync?
- `shares`: one worker is twice slower. How much throughput do shards by speed gain, and is the
  final loss the same?
- `learning`: no worker is slower. Do async and bounded reach the accuracy of all-reduce with the
  same number of samples? With momentum, stale updates need a smaller learning rate: 0.02 here, 0.05
  in the other questions.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

from common.stats import min_max
from paceline.config import from_mapping
from paceline.launch import launcher
from paceline.measure.machine import hardware, software
from paceline.records import Result

BASE: dict[str, Any] = {
    "nproc_per_node": 2, "threads": 1, "tensorboard": False, "sample_seconds": 0,
    "eval_every": "never", "schedule": "cosine", "lr": 0.05, "test_samples": 2000,
}  # fmt: skip

Case = dict[str, Any]
Runs = dict[str, list[Result]]


def server(mode: str, **settings: Any) -> Case:
    return {"strategy": "parameter_server", "options": {"mode": mode}, **settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=tuple(QUESTIONS))
    options = parser.parse_args()
    print(f"{hardware()['cpu']}, torch {software()['torch']}; lenet on digits")
    for name, question in QUESTIONS.items():
        if options.only in (None, name):
            question(options.repeats, 10 if options.quick else 1)


def servers(repeats: int, divisor: int) -> None:
    budget = {"train_samples": 20_000 // divisor, "epochs": 1, "slow": "1=4", "batch_size": 256}
    cases = {mode: server(mode, **budget) for mode in ("sync", "async", "bounded")}
    runs = take_turns(cases, repeats)
    print(f"\nservers: batch 256, rank 1 four times slower, {repeats} repeats")
    print(f"{'mode':<10}{'seconds':>24}{'sooner than sync':>24}{'accuracy':>24}{'rank 1 did':>12}")
    for mode, results in runs.items():
        sooner = [
            seconds(slow) / seconds(own) for slow, own in zip(runs["sync"], results, strict=True)
        ]
        part = statistics.median(
            each["workers"][1]["samples"] / each["samples"] for each in results
        )
        print(
            f"{mode:<10}{min_max(map(seconds, results)):>24}{min_max(sooner):>24}"
            f"{min_max(map(accuracy, results)):>24}{part:>11.0%}"
        )


def shares(repeats: int, divisor: int) -> None:
    budget = {"train_samples": 40_000 // divisor, "epochs": 1, "slow": "1=2", "batch_size": 256}
    cases = {
        "equal": {"strategy": "allreduce", "options": {"flat": "true"}, **budget},
        "auto": {"strategy": "allreduce", "options": {"flat": "true"}, "shares": "auto", **budget},
    }
    runs = take_turns(cases, repeats)
    print(f"\nshares: batch 256, rank 1 twice slower, {repeats} repeats")
    print(f"{'shares':<10}{'samples/s':>24}{'more than equal':>24}{'test loss':>24}{'differs':>12}")
    for name, results in runs.items():
        more = [rate(own) / rate(equal) for equal, own in zip(runs["equal"], results, strict=True)]
        differs = max(
            abs(loss(own) / loss(equal) - 1)
            for equal, own in zip(runs["equal"], results, strict=True)
        )
        print(
            f"{name:<10}{min_max(map(rate, results)):>24}{min_max(more):>24}"
            f"{min_max(map(loss, results), '.4f'):>24}{differs:>11.2%}"
        )


def learning(repeats: int, divisor: int) -> None:
    budget = {"train_samples": 20_000 // divisor, "epochs": 2, "batch_size": 64, "lr": 0.02}
    cases = {
        "allreduce": {"strategy": "allreduce", "options": {"flat": "true"}, **budget},
        **{mode: server(mode, **budget) for mode in ("async", "bounded")},
    }
    runs = take_turns(cases, repeats)
    print(f"\nlearning: batch 64, nobody slower, {repeats} repeats")
    print(f"{'mode':<10}{'accuracy':>24}{'more than allreduce':>24}{'behind, mean':>16}")
    for name, results in runs.items():
        more = [
            accuracy(own) - accuracy(other)
            for other, own in zip(runs["allreduce"], results, strict=True)
        ]
        stale = [
            worker["staleness"]["behind"]["mean"]
            for each in results
            for worker in each["workers"]
            if "staleness" in worker
        ]
        behind = f"{statistics.median(stale):.2f}" if stale else "-"
        print(
            f"{name:<10}{min_max(map(accuracy, results), '.4f'):>24}"
            f"{min_max(more, '.4f'):>24}{behind:>16}"
        )


QUESTIONS: dict[str, Callable[[int, int], None]] = {
    "servers": servers,
    "shares": shares,
    "learning": learning,
}


def take_turns(cases: dict[str, Case], repeats: int) -> Runs:
    """Run all cases once per repeat, so that background load affects all of them.

    Each repeat has its own seed, the same for all cases.
    """
    runs: Runs = {name: [] for name in cases}
    for repeat in range(repeats):
        for name, case in cases.items():
            runs[name].append(run({**case, "seed": repeat}))
    return runs


def run(settings: dict[str, Any]) -> Result:
    with tempfile.TemporaryDirectory() as out:
        outcome = launcher.train(from_mapping({**BASE, **settings, "out": out}), quiet=True)
    if outcome.result is None or outcome.exit_code:
        raise SystemExit(f"a run failed: {outcome.result and outcome.result['cause']}")
    return outcome.result


def seconds(result: Result) -> float:
    """Training time until the last update of the slowest worker, without evaluation."""
    return float(result["history"][-1]["seconds"])


def rate(result: Result) -> float:
    return float(result["samples"]) / seconds(result)


def accuracy(result: Result) -> float:
    return float(result["final"]["test_accuracy"])


def loss(result: Result) -> float:
    return float(result["final"]["test_loss"])


if __name__ == "__main__":
    main()
