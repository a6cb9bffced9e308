"""Runs that plans are compared with: calibrations with two workers, and held-out runs with more.

Workers are the nodes of an emulated cluster with one of LINKS, or those of this host (ONE_HOST).

Each measurement has a name, and is one JSON line of a file, which may have a name several times:

- LINK/comm: `paceline comm` with two workers; host/comm-WORKERS with more of them.
- LINK/MODEL/calibration: runs of one worker with several batches, a run of each strategy with two
  workers, and the calibration (plan/calibration.py) that follows from them, without collectives.
- LINK/MODEL/WORKERS/STRATEGY: a held-out run. Of several, the median of their step times counts.

The `session` (default: 1) of a line counts the commands that measured: later ones may have run on
another machine of the same kind, or in another load.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from common.replayed_model import record_times
from paceline.analysis.collection import collect
from paceline.analysis.contention import other_processes_share
from paceline.analysis.run import open_run
from paceline.plan.calibration import Calibration, ComputePoint
from paceline.plan.comm_records import comm_timings
from paceline.plan.measurement import (
    COMM,
    FEWEST_PERIODS,
    PILOT_STEPS,
    READY_TIMES,
    RUN_SECONDS,
    ShortRuns,
    comm_workers,
    measure_side_by_side,
    run_steps,
)
from paceline.plan.prediction import Predictor
from paceline.plan.run_calibration import calibrate, measured_run
from paceline.plan.target import Target

LINKS = {
    "1gbit": "bandwidth=1gbit",
    "100mbit": "bandwidth=100mbit",
    "1gbit-1ms": "bandwidth=1gbit,latency=1ms",
}
ONE_HOST = "host"
"""In place of a link."""
MODELS: dict[str, dict[str, Any]] = {
    "lenet": {"model_options": {"width": "2"}},
    "vgg11": {"model_options": {"width": "0.125"}},
    "mlp": {"data": "plain_digits", "model_options": {"width": "0.25"}},
    "resnet18": {"model_options": {"width": "0.125"}},
}
"""With 0.5 to 1 MB of gradients, so that steps take from 10 ms to 1 s on all links."""
SAMPLE_SHAPES = {"plain_digits": (1, 28, 28), "digits": (3, 32, 32)}
CLASSES = 10
STRATEGIES = (
    "gather_scatter", "allreduce", "ring", "overlap", "ddp", "sharded", "parameter_server",
    "local_sgd",
)  # fmt: skip
WORKERS = (8, 4, 3)
"""Those that take the longest first."""
BATCH_SIZE = 192
"""Global, so that all workers have equal shares."""
LOCAL_BATCHES = (24, 48, 64, 96)
"""Of the runs of one worker: the shares of 8, 4, 3 and 2 workers."""
REPLAYED = "common.replayed_model:replayed"
ATTEMPTS = 3
COMM_SIZES = "256,4k,16k,64k,256k,1m,2m"


class Measurements:
    """The lines of a file by name; several processes may add lines at the same time."""

    def __init__(self, path: Path, session: int | None = None) -> None:
        """With `session`, held-out runs of this one only."""
        self._path, self._session = path, session
        self.by_name: dict[str, Any] = {}
        """The last line of each name."""
        self._run_seconds: dict[str, list[float]] = {}
        self.sessions = 0
        self._predictors: dict[str, Predictor] = {}
        self.read()

    def read(self) -> None:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.by_name, self._run_seconds, self.sessions = {}, {}, 0
        for one in map(json.loads, lines):
            name, session = one.pop("name"), one.get("session", 1)
            self.sessions = max(self.sessions, session)
            if "run" in one and self._session not in (None, session):
                continue
            self.by_name[name] = one
            if "run" in one:
                self._run_seconds.setdefault(name, []).append(one["run"]["step_seconds"])

    def run_seconds(self, name: str) -> Sequence[float]:
        """Step time of each of the held-out runs with this name."""
        return self._run_seconds.get(name, ())

    def add(self, name: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(_rounded({"name": name, **values}), separators=(",", ":")) + "\n"
        # One system call, so that lines of other processes are not torn apart.
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())
        self.read()

    def has_calibration(self, link: str, model: str) -> bool:
        return {f"{link}/comm", f"{link}/{model}/calibration"} <= self.by_name.keys()

    def predictor(self, link: str, model: str) -> Predictor:
        key = f"{link}/{model}/calibration"
        if key not in self._predictors:
            record = self.by_name[key]["calibration"]
            collectives = [
                timing
                for name, one in self.by_name.items()
                if name == f"{link}/comm" or name.startswith(f"{link}/comm-")
                for timing in comm_timings(one["record"], name)
            ]
            self._predictors[key] = Predictor(
                dataclasses.replace(
                    Calibration.from_dict(record),
                    collectives=tuple(collectives),
                    compute=self._compute(model, link == ONE_HOST),
                )
            )
        return self._predictors[key]

    def _compute(self, model: str, is_one_host: bool) -> tuple[ComputePoint, ...]:
        """The median of all links for each batch, because runs of one worker use no link."""
        points: dict[int, list[ComputePoint]] = {}
        for link in (ONE_HOST,) if is_one_host else LINKS:
            if one := self.by_name.get(f"{link}/{model}/calibration"):
                for point in Calibration.from_dict(one["calibration"]).compute:
                    points.setdefault(point.samples, []).append(point)
        return tuple(
            sorted(same, key=lambda point: point.seconds)[(len(same) - 1) // 2]
            for _, same in sorted(points.items())
        )


def _rounded(value: Any) -> Any:
    """Floats with five digits: more than a measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list | tuple) else value


def run_settings(
    job: Mapping[str, Any], machines: Mapping[str, Any], batch: int, steps: int
) -> dict[str, Any]:
    """Settings of a short run, whose workers compute on one thread each."""
    return {
        **job,
        **machines,
        "batch_size": batch,
        "iterations": steps,
        "train_samples": 5 * BATCH_SIZE,
        "test_samples": 16,
        "device": "cpu",
        "threads": 1,
    }


def read_comm_record(file: Path) -> dict[str, Any]:
    """What plans need of a record of `paceline comm`."""
    record = json.loads(file.read_text())
    kept = ("kind", "nodes", "workers", "tensors", "cluster", "plan", "measurements", "codecs")
    return {key: record[key] for key in kept if key in record}


def calibration_names() -> Iterator[str]:
    for links in ((*LINKS,), (ONE_HOST,)):
        yield from (f"{link}/comm" for link in links)
        if ONE_HOST in links:
            yield from (f"{ONE_HOST}/comm-{workers}" for workers in _comm_workers())
        yield from (f"{link}/{model}/calibration" for model in MODELS for link in links)


def _comm_workers() -> list[int]:
    """Besides two, on this host."""
    return comm_workers(max(WORKERS), os.cpu_count() or 1)


def held_out_names(workers: int) -> Iterator[str]:
    """Model by model, so that a part of them has all links and strategies."""
    for links in ((*LINKS,), (ONE_HOST,)):
        for model in MODELS:
            for link in links:
                yield from (f"{link}/{model}/{workers}/{strategy}" for strategy in STRATEGIES)


def prepare_replay(folder: Path, models: Mapping[str, Any], batches: Sequence[int]) -> None:
    """Put compute times of the models into a folder, where they are missing, and let workers import
    the model that replays them.

    Before anything else uses the cores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for model, job in models.items():
        if not (file := folder / f"{model}.json").exists():
            options = {key: float(value) for key, value in job["model_options"].items()}
            shape = SAMPLE_SHAPES[job.get("data", "digits")]
            record_times(file, model, options, shape, CLASSES, batches)
    known = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = f"{here}{os.pathsep}{known}" if known else here


def model_settings(
    models: Mapping[str, Mapping[str, Any]], model: str, times: Path | None
) -> dict[str, Any]:
    """Settings of a job; with `times`, the folder of `prepare_replay`, it waits for these times."""
    job = {"model": model, **models[model]}
    if times is None:
        return job
    return {**job, "model": REPLAYED, "model_options": {"times": str(times / f"{model}.json")}}


class Measurer:
    """Makes the measurement of a name, and adds it to the file."""

    def __init__(
        self,
        out: Measurements,
        runs: ShortRuns,
        cpus: float | None,
        most_busy: float,
        session: int = 1,
        times: Path | None = None,
    ) -> None:
        """Runs during which other processes used more than `most_busy` of the CPU are repeated,
        unless nodes have cores of their own.

        Without `cpus`, nodes share all cores. With `times`, models replay the compute times that
        `prepare_replay` put into that folder.
        """
        self._out, self._runs, self._cpus, self._session = out, runs, cpus, session
        self._times = times
        self._attempts = 1 if cpus is None or cpus >= 1 else ATTEMPTS
        self._most_busy = most_busy
        self._numbers = count()
        """Names of runs."""

    def measure(self, name: str) -> None:
        link, *rest = name.split("/")
        with tempfile.TemporaryDirectory() as folder:
            match rest:
                case [comm] if comm.startswith("comm"):
                    workers = int(comm.removeprefix("comm-")) if comm != "comm" else 2
                    self._out.add(name, self._comm(Path(folder) / "comm.json", link, workers))
                case [model, "calibration"]:
                    self._out.add(name, self._calibration(Path(folder), link, model))
                case [model, workers, strategy]:
                    job = link, model, int(workers), strategy
                    self._out.add(name, self._held_out(Path(folder), *job))

    def _comm(self, file: Path, link: str, workers: int) -> dict[str, Any]:
        machines = {**self._machines(link, workers), "threads": 1}
        selection = {**COMM, "sizes": COMM_SIZES, "seconds": "0.4"}
        self._runs.comm(file, machines, **selection)
        return {"record": read_comm_record(file)}

    def _calibration(self, folder: Path, link: str, model: str) -> dict[str, Any]:
        wanted: list[tuple[int, Mapping[str, Any], int]]
        wanted = [(1, {"strategy": "single"}, samples) for samples in LOCAL_BATCHES]
        wanted += [(2, {"strategy": strategy}, BATCH_SIZE) for strategy in STRATEGIES]
        wanted += [(2, READY_TIMES, BATCH_SIZE)]
        runs = folder / "runs"
        runs.mkdir()
        # The first run only shows how many steps the others need.
        pilot = self._train(
            folder / "pilot", link, model, 1, {"strategy": "single"}, BATCH_SIZE // 2, PILOT_STEPS
        )
        steps = run_steps(open_run(pilot).iteration_seconds or RUN_SECONDS)
        for workers, settings, batch in wanted:
            run = self._train(folder / "all", link, model, workers, settings, batch, steps)
            steps = run_steps(open_run(run).iteration_seconds or RUN_SECONDS)
            run.rename(runs / run.name)
        found = calibrate([str(runs)])
        if link == ONE_HOST:
            settings = run_settings(
                model_settings(MODELS, model, self._times), {}, min(LOCAL_BATCHES), steps
            )
            (alone,) = (one.seconds for one in found.compute if one.samples == min(LOCAL_BATCHES))
            points = measure_side_by_side(
                self._runs, folder / "all", settings, alone, max(WORKERS), os.cpu_count() or 1
            )
            found = dataclasses.replace(found, side_by_side=tuple(points))
        busy = [other_processes_share(run) or 0.0 for run in collect(runs).runs]
        return {
            "calibration": dataclasses.replace(found, sources=()).to_dict(),
            "busy": sum(busy) / len(busy),
        }

    def _held_out(
        self, folder: Path, link: str, model: str, workers: int, strategy: str
    ) -> dict[str, Any]:
        steps = self._expected_steps(link, model, workers, strategy)
        settings = {"strategy": strategy}
        run = open_run(self._train(folder, link, model, workers, settings, BATCH_SIZE, steps))
        values = {**dataclasses.asdict(measured_run(run)), "name": ""}
        busy = other_processes_share(run)
        return {"session": self._session, "run": values, "steps": steps - 1, "busy": busy}

    def _expected_steps(self, link: str, model: str, workers: int, strategy: str) -> int:
        self._out.read()
        if not self._out.has_calibration(link, model):
            return run_steps(0.0, FEWEST_PERIODS)
        predictor = self._out.predictor(link, model)
        run = predictor.calibration.runs[0]
        target = Target(strategy, workers, BATCH_SIZE, link=run.link, backend=run.backend)
        return run_steps(predictor.predict(target).step_seconds.median)

    def _train(
        self,
        out: Path,
        link: str,
        model: str,
        workers: int,
        own: Mapping[str, Any],
        batch: int,
        steps: int,
    ) -> Path:
        job = {**model_settings(MODELS, model, self._times), **own}
        settings = run_settings(job, self._machines(link, workers), batch, steps)
        attempts: list[tuple[float, Path]] = []
        while len(attempts) < self._attempts:
            run = self._runs.train(out, f"{next(self._numbers)}", settings)
            attempts.append((other_processes_share(open_run(run)) or 0.0, run))
            if attempts[-1][0] <= self._most_busy:
                break
        return min(attempts)[1]

    def _machines(self, link: str, workers: int) -> dict[str, Any]:
        if link == ONE_HOST:
            return {"nproc_per_node": workers}
        shaped = f",{LINKS[link]}" if workers > 1 else ""
        cpus = "" if self._cpus is None else f",cpus={self._cpus:g}"
        return {"cluster": f"nodes={workers}{cpus}{shaped}"}
