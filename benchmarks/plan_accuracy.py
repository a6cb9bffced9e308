"""How well plans made on two nodes predict runs on 3, 4 and 8 nodes; `measure` needs root.

    python benchmarks/plan_accuracy.py [predict [FILE]] [--only PATTERN] [--session N] [--cases]
    python benchmarks/plan_accuracy.py measure FILE [--cpus X] [--replay] [--only PATTERN]
                                           [--repeats N] [--limit SECONDS]

`predict` predicts the held-out runs that FILE has (default: those recorded for the tests), and
prints the error relative to the measured step time, the rank correlation of the strategies for each
link, model and number of nodes, and how many measurements are within the 80% intervals. It shows
the same for the form of AdaptDL's model (Qiao et al., OSDI 2021), fitted to the same runs, and how
far the strategy that is predicted to be the fastest is from the fastest measured one. How much
repeated runs differ shows which errors no model can avoid. With --session, only held-out runs of
that `measure` command count: those of the calibrations have session 1.

`measure` runs emulated clusters (common/plan_measurements.py). Links have 100 Mbit/s, 1 Gbit/s, and
1 Gbit/s with a round trip of 1 ms, which emulation/forwarder.c adds if the kernel has no netem
(docs/emulation.md). Each node has --cpus cores, by default two, pinned. With less than one, nodes
share cores, and the machine must be quiet: runs during which other processes used more than --busy
of the CPU are repeated, and the quietest of three is kept. Clusters run side by side as long as
the machine has cores for them, the calibrations first.

With --replay, nodes wait as long as the model computes on one idle core, instead of computing
(common/replayed_model.py), so one core per node suffices (--cpus 1). Without --cpus, they share all
cores, and one cluster runs at a time: so two cores suffice, except for the communication of eight
nodes. The compute times are in FILE with the suffix .times.

A process for each cluster starts its runs from a warm fork server, and appends them to FILE at
once. Those that FILE has are not measured again, unless held-out runs are to be repeated: with
--limit, all of them can be measured in several parts.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import monotonic

import numpy as np

from common.plan_measurements import (
    LOCAL_BATCHES,
    MODELS,
    STRATEGIES,
    WORKERS,
    Measurements,
    Measurer,
    calibration_names,
    held_out_names,
    prepare_replay,
)
from common.side_by_side import Batch, measure_side_by_side
from paceline.plan.calibration import Calibration, MeasuredRun, parse
from paceline.plan.option_variants import EXACT_STRATEGIES
from paceline.plan.target import Target

RECORDED = Path(__file__).parents[1] / "tests" / "plan" / "recorded" / "replayed_compute.jsonl"

NODE_CPUS = 2.0
"""Of nodes that compute."""
CLOSE = 1.1
"""Step time of a good choice, relative to the best one."""


def batches(out: Measurements, only: str, repeats: int) -> Iterator[Batch]:
    """What is missing, in the order of starting; a calibration needs the collectives of its link
    only when it is used."""
    for name in calibration_names():
        if fnmatchcase(name, only) and name not in out.by_name:
            _, _, more = name.partition("/comm-")
            yield Batch((name,), int(more or 2))
    # All of them once, before any is repeated.
    for repeat in range(repeats):
        for workers in WORKERS:
            wanted = (name for name in held_out_names(workers) if fnmatchcase(name, only))
            if missing := tuple(name for name in wanted if len(out.run_seconds(name)) <= repeat):
                yield Batch(missing, workers)


def measure(out: Measurements, options: argparse.Namespace) -> None:
    end = monotonic() + options.limit
    cpus, times = options.cpus, None
    if not options.replay:
        cpus = cpus or NODE_CPUS
    else:
        times = options.file.with_suffix(".times").absolute()
        prepare_replay(times, MODELS, LOCAL_BATCHES)
    session = out.sessions + 1
    start = partial(Measurer, out, cpus=cpus, most_busy=options.busy, session=session, times=times)
    wanted = batches(out, options.only, options.repeats)
    measure_side_by_side(wanted, cpus or float(os.cpu_count() or 1), end, start)
    out.read()
    if missing := sum(len(batch.names) for batch in batches(out, options.only, options.repeats)):
        print(f"{missing} are missing: start the command again")


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out run and what was predicted for it."""

    name: str
    runs: tuple[float, ...]
    """Measured step times of repeated runs."""
    predicted: float
    low: float
    high: float
    """Of the 80% interval."""
    baseline: float
    busy: float

    @property
    def measured(self) -> float:
        return median(self.runs)

    @property
    def coverage(self) -> float:
        """Share of the runs within the interval."""
        return fmean(self.low <= seconds <= self.high for seconds in self.runs)

    def error(self, predicted: float) -> float:
        return predicted / self.measured - 1


def predict(measurements: Measurements, only: str) -> list[Case]:
    cases = []
    for name, one in measurements.by_name.items():
        link, model, *_ = name.split("/")
        if (
            "run" not in one
            or not measurements.has_calibration(link, model)
            or not fnmatchcase(name, only)
        ):
            continue
        run = parse(MeasuredRun, one["run"])
        predictor = measurements.predictor(link, model)
        target = Target.of(run)
        step = predictor.predict(target).step_seconds
        runs = tuple(measurements.run_seconds(name))
        baseline = adaptdl_step_seconds(predictor.calibration, target)
        busy = one["busy"] or 0.0
        cases.append(Case(name, runs, step.median, step.low, step.high, baseline, busy))
    return cases


def adaptdl_step_seconds(calibration: Calibration, target: Target) -> float:
    """AdaptDL's model: compute a + b * samples, network c + d * (workers - 2), combined by a norm.

    Its fit keeps d at zero until more than two workers were measured, and prefers the sum of both
    times to other norms that explain the runs as well.
    """
    samples = [point.samples for point in calibration.compute]
    slope, constant = np.polyfit(samples, [point.seconds for point in calibration.compute], 1)
    run = next(
        each
        for each in calibration.runs
        if (each.strategy, dict(each.options)) == (target.strategy, dict(target.options))
    )
    network = max(run.step_seconds - (constant + slope * run.samples), 0.0)
    return float(constant + slope * target.samples_of_worker + network)


def run_to_run_differences(cases: list[Case]) -> list[float]:
    """From the first to the second run of each cell that was repeated, relative to their mean."""
    pairs = [case.runs[:2] for case in cases if len(case.runs) > 1]
    return [(second - first) / fmean((first, second)) for first, second in pairs]


def print_run_to_run(differences: list[float]) -> None:
    """A shift of all second runs is that of their machine or session. Only what remains is noise,
    from which an exact model of a session would be off by sqrt(2) less than two of its runs."""
    shift = float(np.median(differences))
    for title, values in (
        ("two runs of a cell differ by", np.abs(differences)),
        (
            f"without the shift of {shift:+.1%} of second runs, by",
            np.abs(np.array(differences) - shift),
        ),
    ):
        middle, tail = np.quantile(values, (0.5, 0.9))
        print(f"{title} {middle:.1%} (median of {len(values)} cells, 90%: {tail:.1%})")
    print(
        "an exact model of a session would be off by"
        f" {middle / math.sqrt(2):.1%} (90%: {tail / math.sqrt(2):.1%})"
    )


def repeated_rank_correlation(cases: list[Case]) -> float:
    """Of the strategies, between the first and the last run of their cells; NaN without groups.

    Strategies often differ by less than two runs do, so predictions cannot be ranked better.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        if len(case.runs) > 1:
            groups.setdefault(case.name.rpartition("/")[0], []).append(case)
    found = [
        rank_correlation([case.runs[0] for case in group], [case.runs[-1] for case in group])
        for group in groups.values()
        if len(group) > 2
    ]
    return fmean(found) if found else math.nan


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    differences = float(np.sum((ranks[0] - ranks[1]) ** 2))
    return 1 - 6 * differences / (len(first) * (len(first) ** 2 - 1))


def choices(cases: list[Case]) -> dict[str, float]:
    """Measured step time of the strategy that is predicted to be the fastest, relative to the best.

    By link, model and number of workers, among the strategies that compute what one worker does.
    """
    exact = set(EXACT_STRATEGIES) & set(STRATEGIES)
    groups: dict[str, list[Case]] = {}
    for case in cases:
        group, _, strategy = case.name.rpartition("/")
        if strategy in exact:
            groups.setdefault(group, []).append(case)
    return {
        name: min(group, key=lambda case: case.predicted).measured
        / min(case.measured for case in group)
        for name, group in groups.items()
        if len(group) == len(exact)
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """Of relative errors of the step time."""

    median: float
    tail: float
    """90% of the errors are smaller."""
    bias: float
    rank_correlation: float
    """Of the strategies, mean over links, models and numbers of workers; NaN without groups."""
    coverage: float
    """Share of runs within the 80% intervals."""

    @classmethod
    def of(cls, cases: list[Case], is_baseline: bool = False) -> Summary:
        chosen = [case.baseline if is_baseline else case.predicted for case in cases]
        signed = np.array([case.error(each) for case, each in zip(cases, chosen, strict=True)])
        groups: dict[str, list[int]] = {}
        for index, case in enumerate(cases):
            groups.setdefault(case.name.rpartition("/")[0], []).append(index)
        correlations = [
            rank_correlation([cases[i].measured for i in group], [chosen[i] for i in group])
            for group in groups.values()
            if len(group) > 2
        ]
        return cls(
            float(np.median(np.abs(signed))),
            float(np.quantile(np.abs(signed), 0.9)),
            float(np.median(signed)),
            float(np.mean(correlations)) if correlations else math.nan,
            fmean(case.coverage for case in cases),
        )


def _row(label: str, cases: list[Case], is_baseline: bool = False) -> str:
    found = Summary.of(cases, is_baseline)
    correlation = "" if math.isnan(found.rank_correlation) else f"{found.rank_correlation:.2f}"
    coverage = "" if is_baseline else f"{found.coverage:.0%}"
    return (
        f"{label:22}{len(cases):4}{found.median:9.1%}{found.tail:9.1%}{found.bias:+9.1%}"
        f"{correlation:>11}{coverage:>9}"
    )


def print_table(cases: list[Case], shows_cases: bool) -> None:
    if shows_cases:
        for case in sorted(cases, key=lambda case: -abs(math.log(case.predicted / case.measured))):
            print(
                f"{case.name:40}{1e3 * case.measured:9.1f} ms{1e3 * case.predicted:9.1f} ms"
                f"{case.error(case.predicted):+8.1%}{'' if case.coverage else ' outside':8}"
                f" busy {case.busy:.0%}"
            )
    print(f"{'':22}{'n':>4}{'median':>9}{'90%':>9}{'bias':>9}{'rank corr.':>11}{'covered':>9}")
    for position in range(4):
        keys = dict.fromkeys(case.name.split("/")[position] for case in cases)
        for key in keys:
            print(_row(key, [case for case in cases if case.name.split("/")[position] == key]))
    print(_row("all", cases))
    print(_row("AdaptDL's model", cases, is_baseline=True))
    if chosen := [*choices(cases).values()]:
        close = sum(ratio <= CLOSE for ratio in chosen)
        print(
            f"the strategy predicted to be the fastest is within {CLOSE - 1:.0%} of the best in"
            f" {close} of {len(chosen)} groups (median {np.median(chosen):.2f} times its time)"
        )
    if differences := run_to_run_differences(cases):
        print_run_to_run(differences)
        print(f"rank correlation of first and last runs: {repeated_rank_correlation(cases):.2f}")
    busy = [case.busy for case in cases]
    print(f"other processes used {np.median(busy):.0%} of the CPU (at most {max(busy):.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("measure", "predict"), default="predict")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", default=RECORDED)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as '1gbit/lenet/*'")
    parser.add_argument(
        "--cpus", type=float, metavar="X", help="of a node (default: 2; with --replay all cores)"
    )
    parser.add_argument("--replay", action="store_true", help="nodes wait instead of computing")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--session", type=int, metavar="N", help="held-out runs of this one only")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--busy", type=float, default=0.2, metavar="X", help="(default: 0.2)")
    parser.add_argument("--cases", action="store_true", help="also print each prediction")
    options = parser.parse_args()
    if options.command == "measure":
        if options.file == RECORDED:
            parser.error("name the FILE to measure into")
        measure(Measurements(options.file), options)
        return
    measurements = Measurements(options.file, options.session)
    cases = predict(measurements, options.only)
    if not cases:
        parser.error(f"{options.file} has no held-out run with a calibration for {options.only}")
    print_table(cases, options.cases)


if __name__ == "__main__":
    main()
