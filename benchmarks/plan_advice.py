"""Compares the recommendations of `paceline plan --advise` with exhaustive studies.

    python benchmarks/plan_advice.py [check [FILE]] [--cases]
    python benchmarks/plan_advice.py measure FILE [--cpus X] [--replay] [--only PATTERN]
                                         [--limit SECONDS]

There are twelve cases: three models with 2 to 3 MB of gradients, links of 1 Gbit/s and 100 Mbit/s,
4 and 8 nodes. `measure` (which needs root) measures in emulated clusters, whose nodes have --cpus
cores each, by default one:

- LINK/comm: collectives and codecs between two nodes.
- MODEL/calibration: runs on one node with three batches, and on two nodes with each link, one of
  `overlap` that measures when gradients are ready and one of `ring`.
- LINK/MODEL/NODES/CONFIGURATION: one run of the exhaustive study of a case: every configuration
  that `--advise` chooses among, and codecs for three strategies.

Each is a line of FILE, with the seconds that it took, without those of creating the cluster.
Clusters run side by side as long as the machine has cores for them. What FILE has is not measured
again: with --limit, all can be measured in several parts. With --replay, nodes wait as long as the
model computes on one idle core, and share all cores without --cpus, as in plan_accuracy.py.

`check` makes the recommendation for each case from the first two kinds of lines, and compares the
measured step time of the recommended configuration with the best measured one (default FILE: that
of the tests). It also compares the costs, in seconds and in node-seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from common.plan_measurements import (
    BATCH_SIZE,
    Measurements,
    model_settings,
    prepare_replay,
    read_comm_record,
    run_settings,
)
from common.side_by_side import Batch, measure_side_by_side
from paceline.analysis.run import open_run
from paceline.plan.advice import advise
from paceline.plan.calibration import Calibration
from paceline.plan.comm_records import codec_timings, comm_timings
from paceline.plan.links import Link
from paceline.plan.measurement import COMM, FEWEST_PERIODS, READY_TIMES, ShortRuns, run_steps
from paceline.plan.option_variants import EXACT_STRATEGIES
from paceline.plan.prediction import Predictor
from paceline.plan.run_calibration import calibrate
from paceline.plan.target import Target

RECORDED = Path(__file__).parents[1] / "tests" / "plan" / "recorded" / "advice.jsonl"
LINKS = {"1gbit": Link(1e9), "100mbit": Link(1e8)}
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model_options": {"width": "6"}},
    "mlp": {"data": "plain_digits", "model_options": {"width": "0.5"}},
    "vgg11": {"model_options": {"width": "0.25"}},
}
NODES = (8, 4)
NODE_CPUS = 1.0
"""Of nodes that compute."""
LOCAL_BATCHES = (24, 48, 96)
STUDY_SECONDS, STUDY_STEPS = 1.0, (3, 24)
"""Of a run of the exhaustive study, without the first step."""
EXACT = (
    *EXACT_STRATEGIES,
    *(f"{name},bucket_mib={size}" for name in ("overlap", "ddp") for size in ("0.25", "1")),
)
CODECS = ("bf16", "int8", "topk")
CODEC_STRATEGIES = ("overlap", "ddp", "ring")
WITH_CODECS = tuple(f"{name},codec={codec}" for name in CODEC_STRATEGIES for codec in CODECS)
MOST_RATIO = 1.10
"""Step time of a good recommendation, relative to the best configuration."""


def batches(out: Measurements, only: str) -> Iterator[Batch]:
    """What is missing: calibrations first, then exact configurations, then codecs."""

    def missing(*names: str) -> tuple[str, ...]:
        return tuple(each for each in names if fnmatchcase(each, only) and each not in out.by_name)

    wanted = [Batch(missing(f"{link}/comm"), 2) for link in LINKS]
    wanted += [Batch(missing(f"{model}/calibration"), 2) for model in MODELS]
    for configurations in (EXACT, WITH_CODECS):
        for nodes in NODES:
            # Two batches of large clusters, or four of small ones, use all cores of 16.
            groups = [[*MODELS]] if nodes == max(NODES) else [[model] for model in MODELS]
            for link, group in itertools.product(reversed(LINKS), groups):
                pairs = itertools.product(group, configurations)
                names = [f"{link}/{model}/{nodes}/{each}" for model, each in pairs]
                wanted.append(Batch(missing(*names), nodes))
    yield from (batch for batch in wanted if batch.names)


def measure(out: Measurements, options: argparse.Namespace) -> None:
    end = monotonic() + options.limit
    cpus, times = options.cpus, None
    if not options.replay:
        cpus = cpus or NODE_CPUS
    else:
        times = options.file.with_suffix(".times").absolute()
        prepare_replay(times, MODELS, LOCAL_BATCHES)
    start = partial(Measurer, out, cpus=cpus, times=times)
    for is_study in (False, True):
        # The number of steps of a study follows from the calibrations.
        wanted = [each for each in batches(out, options.only) if (each.workers > 2) == is_study]
        measure_side_by_side(wanted, cpus or float(os.cpu_count() or 1), end, start)
        out.read()
    if left := sum(len(batch.names) for batch in batches(out, options.only)):
        print(f"{left} are missing: start the command again")


class Measurer:
    """Makes the measurement of a name, and adds it to the file."""

    def __init__(
        self, out: Measurements, runs: ShortRuns, cpus: float | None, times: Path | None
    ) -> None:
        """As plan_measurements.Measurer."""
        self._out, self._runs, self._cpus, self._times = out, runs, cpus, times
        self._numbers = count()
        """Names of runs."""
        self._warm: set[str] = set()
        """Clusters that exist."""

    def measure(self, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._out.add(name, self._measure(name, Path(folder)))

    def _measure(self, name: str, folder: Path) -> dict[str, Any]:
        match name.split("/"):
            case [link, "comm"]:
                return self._comm(folder / "comm.json", link)
            case [model, "calibration"]:
                return self._calibration(folder, model)
            case [link, model, nodes, configuration]:
                return self._study(folder, link, model, int(nodes), configuration)
        raise ValueError(name)

    def _comm(self, file: Path, link: str) -> dict[str, Any]:
        cluster = self._cluster(link, 2)
        selection = {
            **COMM,
            "algorithms": "library,ring",
            "sizes": "1k,32k,256k,2m",
            "seconds": "0.1",
            "codecs": ",".join(CODECS),
        }
        machines = {"cluster": cluster, "threads": 1}
        self._runs.comm(file, machines, sizes="1k", repeats="1", algorithms="library")
        began = monotonic()
        self._runs.comm(file, machines, **selection)
        seconds = monotonic() - began
        return {
            "record": read_comm_record(file),
            "seconds": seconds,
            "node_seconds": 2 * seconds,
        }

    def _calibration(self, folder: Path, model: str) -> dict[str, Any]:
        """Compute times are measured once for all links."""
        spent = {1: 0.0, 2: 0.0}
        step_seconds = 0.0
        """Of the last run, which the next one resembles."""

        def train(nodes: int, link: str, own: Mapping[str, Any], batch: int) -> Path:
            nonlocal step_seconds
            steps = run_steps(step_seconds, FEWEST_PERIODS)
            run, seconds = self._train(folder, link, model, nodes, own, batch, steps)
            step_seconds = open_run(run).iteration_seconds or 0.0
            spent[nodes] += seconds
            return run

        link, *_ = LINKS
        single = {"strategy": "single"}
        alone = [train(1, link, single, batch) for batch in LOCAL_BATCHES]
        found = {}
        for link in LINKS:
            pair = [train(2, link, own, BATCH_SIZE) for own in (READY_TIMES, {"strategy": "ring"})]
            known = calibrate([str(run) for run in (*alone, *pair)])
            found[link] = dataclasses.replace(known, sources=()).to_dict()
        return {
            "calibrations": found,
            "seconds": math.fsum(spent.values()),
            "node_seconds": math.fsum(nodes * seconds for nodes, seconds in spent.items()),
        }

    def _study(
        self, folder: Path, link: str, model: str, nodes: int, configuration: str
    ) -> dict[str, Any]:
        strategy, options = parse_configuration(configuration)
        known = calibration_of(self._out, link, model)
        target = Target(strategy, nodes, BATCH_SIZE, options, link=LINKS[link])
        predicted = Predictor(known, samples=1).predict(target).step_seconds.median
        fewest, most = STUDY_STEPS
        steps = 1 + min(max(round(STUDY_SECONDS / predicted), fewest), most)
        own = {"strategy": strategy, "options": options}
        run, seconds = self._train(folder, link, model, nodes, own, BATCH_SIZE, steps)
        return {
            "step_seconds": open_run(run).iteration_seconds,
            "steps": steps - 1,
            "seconds": seconds,
            "node_seconds": nodes * seconds,
        }

    def _train(
        self,
        out: Path,
        link: str,
        model: str,
        nodes: int,
        own: Mapping[str, Any],
        batch: int,
        steps: int,
    ) -> tuple[Path, float]:
        """Return the folder of a run, and how long it took."""
        cluster = self._cluster(link, nodes)
        job = {**model_settings(MODELS, model, self._times), **own}
        settings = run_settings(job, {"cluster": cluster}, batch, steps)
        if cluster not in self._warm:
            self._warm.add(cluster)
            self._runs.train(out, f"{next(self._numbers)}", {**settings, "iterations": 1})
        began = monotonic()
        run = self._runs.train(out, f"{next(self._numbers)}", settings)
        return run, monotonic() - began

    def _cluster(self, link: str, nodes: int) -> str:
        cpus = "" if self._cpus is None else f",cpus={self._cpus:g}"
        shape = f",bandwidth={link}" if nodes > 1 else ""
        return f"nodes={nodes}{cpus}{shape}"


def parse_configuration(text: str) -> tuple[str, dict[str, str]]:
    """Parse `overlap,bucket_mib=1`."""
    strategy, *options = text.split(",")
    return strategy, dict(each.split("=", 1) for each in options)


def configuration_text(target: Target) -> str:
    return ",".join([target.strategy, *(f"{key}={value}" for key, value in target.options.items())])


@cache
def calibration_of(measurements: Measurements, link: str, model: str) -> Calibration:
    """What recommendations are made from."""
    found = measurements.by_name[f"{model}/calibration"]["calibrations"][link]
    record = measurements.by_name[f"{link}/comm"]["record"]
    return dataclasses.replace(
        Calibration.from_dict(found),
        collectives=tuple(comm_timings(record, link)),
        codec_timings=tuple(codec_timings(record, link)),
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A study and what was recommended instead of it."""

    name: str
    measured: Mapping[str, float]
    """Step seconds by configuration."""
    recommended: str
    predicted: float

    @property
    def best(self) -> str:
        return min(self.measured, key=lambda each: self.measured[each])

    @property
    def ratio(self) -> float:
        """Step time of the recommended configuration, relative to the best."""
        return self.measured[self.recommended] / self.measured[self.best]


def check(
    measurements: Measurements, configurations: Sequence[str], strategies: Sequence[str]
) -> list[Case]:
    """The cases whose studies are complete."""
    cases = []
    for link in LINKS:
        for model in MODELS:
            for nodes in NODES:
                name = f"{link}/{model}/{nodes}"
                measured = {
                    each: measurements.by_name[f"{name}/{each}"]["step_seconds"]
                    for each in configurations
                    if f"{name}/{each}" in measurements.by_name
                }
                if len(measured) < len(configurations):
                    continue
                known = calibration_of(measurements, link, model)
                targets = [Target(each, nodes, BATCH_SIZE, link=LINKS[link]) for each in strategies]
                if not any("codec=" in each for each in configurations):
                    known = dataclasses.replace(known, codec_timings=())
                advice = advise(known, targets)
                chosen = advice.codec[0] if advice.codec else advice.best
                recommended = configuration_text(chosen.target)
                cases.append(Case(name, measured, recommended, chosen.step_seconds.median))
    return cases


def costs(measurements: Measurements, cases: Sequence[Case], key: str) -> tuple[float, float]:
    """Of the recommendations and of the studies, with codecs: `seconds` or `node_seconds`."""
    by_name = measurements.by_name
    needed = {f"{case.name.split('/')[0]}/comm" for case in cases}
    needed |= {f"{case.name.split('/')[1]}/calibration" for case in cases}
    advice = math.fsum(by_name[name][key] for name in needed)
    studied = {case.name for case in cases}
    study = math.fsum(
        one[key] for name, one in by_name.items() if name.rpartition("/")[0] in studied
    )
    return advice, study


def print_table(
    title: str, measurements: Measurements, cases: Sequence[Case], shows_all: bool
) -> None:
    print(title)
    print(f"{'case':18}{'recommended':24}{'step':>9}{'plan':>10}  {'best':24}{'step':>9} ratio")
    for case in cases:
        chosen, best = case.measured[case.recommended], case.measured[case.best]
        print(
            f"{case.name:18}{case.recommended:24}{1e3 * chosen:6.1f} ms"
            f"{1e3 * case.predicted:7.1f} ms  {case.best:24}{1e3 * best:6.1f} ms{case.ratio:6.2f}"
        )
        if shows_all:
            for each, seconds in sorted(case.measured.items(), key=lambda item: item[1]):
                print(f"{'':20}{each:28}{1e3 * seconds:8.1f} ms")
    within = sum(case.ratio <= MOST_RATIO for case in cases)
    print(f"within {MOST_RATIO - 1:.0%} of the best: {within} of {len(cases)} cases")
    for key in ("seconds", "node_seconds"):
        advice, study = costs(measurements, cases, key)
        label = key.replace("_", "-")
        print(
            f"{label}: {advice:.0f} to calibrate, {study:.0f} for the studies: {advice / study:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("measure", "check"), default="check")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", default=RECORDED)
    parser.add_argument("--replay", action="store_true", help="nodes wait instead of computing")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as '1gbit/lenet/*'")
    parser.add_argument(
        "--cpus", type=float, metavar="X", help="of a node (default: 1; with --replay all cores)"
    )
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--cases", action="store_true", help="also print every measured step time")
    options = parser.parse_args()
    measurements = Measurements(options.file)
    if options.command == "measure":
        if options.file == RECORDED:
            parser.error("name the FILE to measure into")
        measure(measurements, options)
        return
    exact = check(measurements, EXACT, EXACT_STRATEGIES)
    if not exact:
        parser.error(f"{options.file} has no complete study")
    print_table("Exact strategies", measurements, exact, options.cases)
    base = tuple(each for each in EXACT if each.split(",")[0] in CODEC_STRATEGIES)
    if encoded := check(measurements, (*base, *WITH_CODECS), CODEC_STRATEGIES):
        title = f"\nWith codecs: {', '.join(CODEC_STRATEGIES)}"
        print_table(title, measurements, encoded, options.cases)


if __name__ == "__main__":
    main()
