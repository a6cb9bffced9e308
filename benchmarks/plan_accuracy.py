"""How well plans made on two nodes predict runs on 3, 4 and 8 nodes; `measure` needs root.

    python benchmarks/plan_accuracy.py measure FILE [--only PATTERN] [--limit SECONDS] [--busy X]
    python benchmarks/plan_accuracy.py predict FILE [--only PATTERN] [--cases]

`measure` runs emulated clusters whose nodes have a fifth of a core each, so that eight of them fit
on two cores. Links have 100 Mbit/s, 1 Gbit/s, and 1 Gbit/s with a round trip of 1 ms, which
emulation/forwarder.c adds if the kernel has no netem (docs/emulation.md). For each link:

- LINK/comm: `paceline comm` on two nodes.
- LINK/MODEL/calibration: runs on one node with several batches, one run of each strategy on two
  nodes, and the calibration (plan/calibration.py) that follows from them and from LINK/comm.
- LINK/MODEL/NODES/STRATEGY: a held-out run.

Each is appended to FILE as a JSON line, and those that it has are not repeated: with --limit, all
of them can be measured in several parts. The machine must be quiet: `busy` is the share of the CPU
that other processes used. Runs with more than --busy
are repeated, and the quietest of three is kept.

`predict` predicts the held-out runs that FILE has, and prints the error relative to the measured
step time, the rank correlation of the strategies for each link, model and number of nodes, and how
many measurements are within the 80% intervals. It shows the same for the form of AdaptDL's model
(Qiao et al., OSDI 2021), fitted to the same runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from paceline.analysis.collection import collect
from paceline.analysis.contention import other_processes_share
from paceline.analysis.run import open_run
from paceline.errors import RunError
from paceline.plan.calibration import Calibration, MeasuredRun, parse
from paceline.plan.measurement import COMM, ShortRuns
from paceline.plan.prediction import Predictor, Target
from paceline.plan.run_calibration import calibrate, measured_run

LINKS = {
    "100mbit": "bandwidth=100mbit",
    "1gbit": "bandwidth=1gbit",
    "1gbit-1ms": "bandwidth=1gbit,latency=1ms",
}
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model_options": {"width": "2"}},
    "mlp": {"data": "plain_digits", "model_options": {"width": "0.25"}},
    "resnet18": {"model_options": {"width": "0.125"}},
    "vgg11": {"model_options": {"width": "0.125"}},
}
STRATEGIES = (
    "gather_scatter", "allreduce", "ring", "overlap", "ddp", "sharded", "parameter_server",
    "local_sgd",
)  # fmt: skip
NODES = (3, 4, 8)
CPUS = 0.2
BATCH_SIZE = 192
"""Global, so that all workers have equal shares."""
LOCAL_BATCHES = (24, 48, 96)
"""Of the runs on one node: the shares of 8, 4 and 2 nodes."""
ITERATIONS = 17
"""One more than a multiple of the local steps of local_sgd, because the first does not count."""
ATTEMPTS = 3
COMM_SIZES = "1k,4k,16k,64k,256k,1m"


class Measurements:
    """The lines of FILE by name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_name: dict[str, Any] = {one.pop("name"): one for one in map(json.loads, lines)}

    def add(self, name: str, values: dict[str, Any]) -> None:
        self.by_name[name] = values
        with self._path.open("a") as file:
            file.write(json.dumps(_rounded({"name": name, **values})) + "\n")


def _rounded(value: Any) -> Any:
    """Floats with five digits: more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list | tuple) else value


class Measurer:
    """Makes the measurement of a name, and appends it to FILE."""

    def __init__(self, out: Measurements, runs: ShortRuns, most_busy: float) -> None:
        self._out, self._runs, self._most_busy = out, runs, most_busy

    def measure(self, name: str) -> None:
        link, *rest = name.split("/")
        with tempfile.TemporaryDirectory() as folder:
            match rest:
                case ["comm"]:
                    self._out.add(name, self._comm(Path(folder) / "comm.json", link))
                case [model, "calibration"]:
                    self._out.add(name, self._calibration(Path(folder), link, model))
                case [model, nodes, strategy]:
                    run = open_run(self._train(Path(folder), link, model, int(nodes), strategy))
                    values = dataclasses.asdict(measured_run(run))
                    busy = other_processes_share(run)
                    self._out.add(name, {"run": {**values, "name": ""}, "busy": busy})

    def _comm(self, file: Path, link: str) -> dict[str, Any]:
        machines = {"cluster": _cluster(link, 2), "threads": 1}
        self._runs.comm(file, machines, **{**COMM, "sizes": COMM_SIZES, "seconds": "0.4"})
        return {"record": json.loads(file.read_text())}

    def _calibration(self, folder: Path, link: str, model: str) -> dict[str, Any]:
        comm = folder / "comm.json"
        comm.write_text(json.dumps(self._out.by_name[f"{link}/comm"]["record"]))
        runs = folder / "runs"
        runs.mkdir()
        wanted = [(1, "single", samples) for samples in LOCAL_BATCHES]
        wanted += [(2, strategy, BATCH_SIZE) for strategy in STRATEGIES]
        for nodes, strategy, batch in wanted:
            run = self._train(folder / "all", link, model, nodes, strategy, batch)
            run.rename(runs / run.name)
        found = calibrate([str(runs), str(comm)])
        busy = [other_processes_share(run) or 0.0 for run in collect(runs).runs]
        return {
            "calibration": dataclasses.replace(found, sources=()).to_dict(),
            "busy": sum(busy) / len(busy),
        }

    def _train(
        self, out: Path, link: str, model: str, nodes: int, strategy: str, batch: int = BATCH_SIZE
    ) -> Path:
        settings = {
            "model": model,
            **MODELS[model],
            "strategy": strategy,
            "batch_size": batch,
            "iterations": ITERATIONS,
            "train_samples": 5 * BATCH_SIZE,
            "test_samples": 16,
            "threads": 1,
            "cluster": _cluster(link, nodes),
        }
        name = f"{nodes}-{strategy}-{batch}"
        attempts: list[tuple[float, Path]] = []
        while len(attempts) < ATTEMPTS:
            run = self._runs.train(out / f"attempt-{len(attempts)}", name, settings)
            attempts.append((other_processes_share(open_run(run)) or 0.0, run))
            if attempts[-1][0] <= self._most_busy:
                break
        return min(attempts)[1].rename(out / name)


def _cluster(link: str, nodes: int) -> str:
    return f"nodes={nodes},cpus={CPUS:g}" + (f",{LINKS[link]}" if nodes > 1 else "")


def all_names() -> Iterator[str]:
    """In an order that changes the cluster as rarely as possible."""
    for link in LINKS:
        yield f"{link}/comm"
        yield from (f"{link}/{model}/calibration" for model in MODELS)
        for nodes in NODES:
            for model in MODELS:
                yield from (f"{link}/{model}/{nodes}/{strategy}" for strategy in STRATEGIES)


def measure(out: Measurements, only: str, limit_seconds: float, most_busy: float) -> None:
    wanted = [name for name in all_names() if fnmatchcase(name, only)]
    # A calibration needs the times of its link.
    links = {name.split("/")[0] for name in wanted if name.endswith("/calibration")}
    missing = [
        name
        for name in all_names()
        if (name in wanted or name.removesuffix("/comm") in links) and name not in out.by_name
    ]
    end = monotonic() + limit_seconds
    with ShortRuns() as runs:
        measurer = Measurer(out, runs, most_busy)
        for number, name in enumerate(missing):
            began = monotonic()
            if began > end:
                print(f"{len(missing) - number} are missing: start the command again")
                return
            try:
                measurer.measure(name)
            except RunError as error:
                print(f"{name}: {error}", flush=True)
            print(f"{name}: {monotonic() - began:.0f} s", flush=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out run and what was predicted for it."""

    name: str
    measured: float
    predicted: float
    baseline: float
    is_covered: bool
    busy: float

    def error(self, predicted: float) -> float:
        return predicted / self.measured - 1


def predict(measurements: Measurements, only: str) -> list[Case]:
    @cache
    def calibration(link_and_model: str) -> tuple[Calibration, Predictor]:
        record = measurements.by_name[f"{link_and_model}/calibration"]["calibration"]
        found = Calibration.from_dict(record)
        return found, Predictor(found)

    cases = []
    for name, one in measurements.by_name.items():
        of_model = "/".join(name.split("/")[:2])
        is_known = f"{of_model}/calibration" in measurements.by_name
        if "run" not in one or not is_known or not fnmatchcase(name, only):
            continue
        run = parse(MeasuredRun, one["run"])
        calibrated, predictor = calibration(of_model)
        target = Target.of(run)
        step = predictor.predict(target).step_seconds
        is_covered = step.low <= run.step_seconds <= step.high
        baseline = adaptdl_step_seconds(calibrated, target)
        busy = one["busy"] or 0.0
        cases.append(Case(name, run.step_seconds, step.median, baseline, is_covered, busy))
    return cases


def adaptdl_step_seconds(calibration: Calibration, target: Target) -> float:
    """AdaptDL's model: compute a + b * samples, network c + d * (workers - 2), combined by a norm.

    Its fit keeps d at zero until more than two workers were measured, and prefers the sum of both
    times to other norms that explain the runs as well.
    """
    samples = [point.samples for point in calibration.compute]
    slope, constant = np.polyfit(samples, [point.seconds for point in calibration.compute], 1)
    (run,) = (each for each in calibration.runs if each.strategy == target.strategy)
    network = max(run.step_seconds - (constant + slope * run.samples), 0.0)
    return float(constant + slope * target.samples_of_worker + network)


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    differences = float(np.sum((ranks[0] - ranks[1]) ** 2))
    return 1 - 6 * differences / (len(first) * (len(first) ** 2 - 1))


def _row(label: str, cases: list[Case], is_baseline: bool = False) -> str:
    chosen = [case.baseline if is_baseline else case.predicted for case in cases]
    signed = np.array([case.error(each) for case, each in zip(cases, chosen, strict=True)])
    errors = np.abs(signed)
    groups: dict[str, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(case.name.rpartition("/")[0], []).append(index)
    correlations = [
        rank_correlation([cases[index].measured for index in group], [chosen[i] for i in group])
        for group in groups.values()
        if len(group) > 2
    ]
    correlation = f"{np.median(correlations):11.2f}" if correlations else f"{'':11}"
    covered = sum(case.is_covered for case in cases) / len(cases)
    coverage = f"{'':>9}" if is_baseline else f"{covered:9.0%}"
    return (
        f"{label:22}{len(cases):4}{np.median(errors):9.1%}{np.quantile(errors, 0.9):9.1%}"
        f"{np.median(signed):+9.1%}{correlation}{coverage}"
    )


def print_table(cases: list[Case], shows_cases: bool) -> None:
    if shows_cases:
        for case in sorted(cases, key=lambda case: -abs(math.log(case.predicted / case.measured))):
            print(
                f"{case.name:40}{1e3 * case.measured:9.1f} ms{1e3 * case.predicted:9.1f} ms"
                f"{case.error(case.predicted):+8.1%}{'' if case.is_covered else ' outside':8}"
                f" busy {case.busy:.0%}"
            )
    print(f"{'':22}{'n':>4}{'median':>9}{'90%':>9}{'bias':>9}{'rank corr.':>11}{'covered':>9}")
    for position in range(4):
        keys = dict.fromkeys(case.name.split("/")[position] for case in cases)
        for key in keys:
            print(_row(key, [case for case in cases if case.name.split("/")[position] == key]))
    print(_row("all", cases))
    print(_row("AdaptDL's model", cases, is_baseline=True))
    busy = [case.busy for case in cases]
    print(f"other processes used {np.median(busy):.0%} of the CPU (at most {max(busy):.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "predict"))
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="such as '1gbit/lenet/*'")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--busy", type=float, default=0.2, metavar="X", help="(default: 0.2)")
    parser.add_argument("--cases", action="store_true", help="also print each prediction")
    options = parser.parse_args()
    measurements = Measurements(options.file)
    if options.command == "measure":
        measure(measurements, options.only, options.limit, options.busy)
        return
    cases = predict(measurements, options.only)
    if not cases:
        parser.error(f"{options.file} has no held-out run with a calibration for {options.only}")
    print_table(cases, options.cases)


if __name__ == "__main__":
    main()
