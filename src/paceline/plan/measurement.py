"""Measures a job in short runs, so that it can be planned without existing records.

`measure_job` trains for a few seconds with one worker and several batches, with several of them
side by side, and with two workers and each strategy, and runs `paceline comm` between two workers,
and between more of them if they share this host.
It leaves records in a folder, from which run_calibration.py makes the calibration. Only this module
of plan/ starts processes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from paceline.analysis.run import open_run
from paceline.config import RunConfig, cluster_spec, from_mapping, to_argv
from paceline.errors import RunError, UsageError
from paceline.launch.fork_server import ForkServer
from paceline.launch.validation import check_parts
from paceline.measure.machine import hardware
from paceline.models import MODELS
from paceline.plan.calibration import SideBySide
from paceline.plan.host_sharing import write_side_by_side
from paceline.study.clusters import StudyClusters
from paceline.study.runner import CellProcess, last_error_line, train_argv

RUN_SECONDS = 1.5
"""Of the steps of a run, if the number of periods allows it."""
PERIOD = 8
"""Local steps of local_sgd."""
FEWEST_PERIODS, MOST_PERIODS = 2, 25
PILOT_STEPS = 5
SMALLEST_SHARE = 16
"""The smallest measured batch is that of this many workers."""
TIME_LIMIT_SECONDS = 600.0
READY_TIMES = {"strategy": "overlap", "options": {"bucket_mib": "measured"}}
COMM = {
    "operations": "all_reduce,reduce_scatter,all_gather,send_recv",
    "algorithms": "library,ring,root",
    "communicators": "torch",
    "sizes": "1k,16k,128k,1m,8m",
    "seconds": "0.2",
    "most_seconds": "0.5",
    # Without pauses, operations use up the CPU quota of emulated nodes and the bursts of their
    # links. Long ones leave time for few samples of small operations, which vary the most.
    "pause": "0.005",
}

COMM_OF_MORE = {**COMM, "sizes": "1k,64k,1m,4m"}
"""Between more than two workers of a host."""
COMM_IN_MEMORY = {
    **COMM, "operations": "all_reduce", "algorithms": "library", "communicators": "hierarchical",
    "sizes": "1k,128k,1m,8m",
}  # fmt: skip
"""In shared memory, for shared weights."""
MOST_SHARING_WORKERS = 16
"""Of one host, that are measured at once."""


def run_steps(step_seconds: float, most_periods: int = MOST_PERIODS) -> int:
    """Steps of a run: whole periods, and one more because the first step does not count.

    Long steps vary less, so one period of them suffices.
    """
    seconds = max(step_seconds, 1e-6)
    fewest = 1 if seconds > RUN_SECONDS / PERIOD else FEWEST_PERIODS
    periods = round(RUN_SECONDS / seconds / PERIOD)
    return min(max(periods, fewest), most_periods) * PERIOD + 1


class ShortRuns:
    """Runs `paceline train` and `paceline comm`, one after another, in emulated clusters or here.

    Processes start from a fork server, and clusters stay up until the end of the block.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._clusters = self._stack.enter_context(StudyClusters())
        server = ForkServer.spawn()
        self._server = server and self._stack.enter_context(server)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def train(self, out: Path, name: str, settings: Mapping[str, Any]) -> Path:
        """Train, and return the folder of the run; RunError or UsageError if it fails."""
        config = from_mapping({**settings, "eval_every": "never", "out": str(out), "name": name})
        self._run(train_argv(config), out / f"{name}.log", config)
        return out / name

    def comm(self, file: Path, machines: Mapping[str, Any], **selection: str) -> None:
        """Write the record of `paceline comm` between the workers of `machines`."""
        config = from_mapping({**machines, "batch_per_worker": 1})
        argv = ["-m", "paceline", "comm", "--quiet", f"--json={file}", *to_argv(machines)]
        argv += [f"--{key.replace('_', '-')}={value}" for key, value in selection.items()]
        self._run(argv, file.with_suffix(".log"), config)

    def _run(self, argv: list[str], log: Path, config: RunConfig) -> None:
        """Run a command; an error if it fails."""
        process = CellProcess(argv, log, self._server, self._clusters.variables(config))
        try:
            code = process.wait(TIME_LIMIT_SECONDS, lambda spent: None)
        finally:
            process.stop()
        if code != 0:
            kind = UsageError if code == UsageError.exit_code else RunError
            raise kind(f"cannot measure: {last_error_line(log) or f'exit code {code}'}")
        log.unlink()


def measure_job(
    settings: Mapping[str, Any],
    batch_size: int,
    most_workers: int,
    strategies: Sequence[str],
    out: Path,
    codecs: Sequence[str] = (),
    on_one_host: Sequence[str] = (),
) -> None:
    """Measure a job, given by settings of `paceline train`, in runs below the folder `out`.

    Without `cluster`, two workers share this machine, and one worker gets as many threads as each
    of them. Strategies `on_one_host` are then measured too, unless they cannot train this job.
    """
    machine = hardware()
    threads = from_mapping(settings).threads or max(1, machine["cores"] // 2)
    settings = {**settings, "threads": threads}
    cluster = settings.get("cluster")
    one: dict[str, Any] = {}
    two: dict[str, Any] = {"nproc_per_node": 2}
    if cluster:
        spec = cluster_spec.parse(str(cluster))
        one = {"cluster": f"nodes=1,cpus={spec.cpus:g}" if spec.cpus else "nodes=1"}
        two = {}
    smallest = -(-batch_size // max(2, min(most_workers, SMALLEST_SHARE)))
    batches = sorted({smallest, -(-batch_size // 2), batch_size})
    base = {**settings, "train_samples": 20 * batch_size, "test_samples": 1}
    MODELS.load(str(settings.get("model", "lenet")))  # rejects unknown names
    for strategy in strategies:
        check_parts(from_mapping({**base, **two, "strategy": strategy, "batch_size": batch_size}))
    with ShortRuns() as runs:

        def train(name: str, steps: int, **own: Any) -> float:
            run = open_run(runs.train(out, name, {**base, **own, "iterations": steps}))
            return float(run.iteration_seconds or 0.0)

        def train_two(strategy: str) -> None:
            _tell(f"measuring {strategy} with two workers")
            own = {"strategy": strategy, "batch_size": batch_size, **two}
            train(f"two-workers-{strategy}", run_steps(pilot), **own)

        _tell(f"measuring {settings.get('model', 'lenet')} with one worker")
        single = {"strategy": "single", **one}
        pilot = train("pilot", PILOT_STEPS, batch_size=batch_size, **single)
        shutil.rmtree(out / "pilot")  # too short for a calibration
        for batch in batches:
            steps = run_steps(pilot * max(batch / batch_size, 0.25))
            train(f"one-worker-{batch}", steps, batch_size=batch, **single)
        shares_host = not cluster and not machine["gpus"]
        measured = [*strategies]
        at_once = max(1, machine["cores"] // threads)
        """Workers that the cores are enough for."""
        if shares_host:
            _tell("measuring workers side by side")
            share = {**base, "batch_size": smallest}
            seconds = pilot * max(smallest / batch_size, 0.25)
            points = measure_side_by_side(runs, out, share, seconds, most_workers, at_once)
            write_side_by_side(out, str(settings.get("model", "lenet")), points)
        for strategy in strategies:
            train_two(strategy)
        for strategy in on_one_host if shares_host else ():
            try:
                train_two(strategy)
                measured.append(strategy)
            except (RunError, UsageError) as error:
                shutil.rmtree(out / f"two-workers-{strategy}", ignore_errors=True)
                _tell(f"{strategy} is left out ({error})")
        _tell("measuring when gradients are ready")
        steps = run_steps(pilot, FEWEST_PERIODS)
        train("ready-times", steps, **READY_TIMES, batch_size=batch_size, **two)
        _tell("measuring collectives between two workers")
        machines = {key: base[key] for key in ("threads", "cluster") if key in base} | two
        selection = {**COMM, "codecs": ",".join(codecs)} if codecs else COMM
        runs.comm(out / "comm.json", machines, **selection)
        if is_memory_shared := shares_host and "shared" in measured:
            runs.comm(out / "comm-shared.json", machines, **COMM_IN_MEMORY)
        if shares_host:
            for workers in comm_workers(most_workers, at_once):
                _tell(f"measuring collectives between {workers} workers")
                machines["nproc_per_node"] = workers
                runs.comm(out / f"comm-{workers}.json", machines, **COMM_OF_MORE)
                if is_memory_shared:
                    runs.comm(out / f"comm-shared-{workers}.json", machines, **COMM_IN_MEMORY)


def comm_workers(most_workers: int, at_once: int) -> list[int]:
    """Numbers of workers of one host, besides two, whose collectives are measured.

    They slow each other down: as many as the cores are enough for, and as are planned.
    """
    planned = min(most_workers, MOST_SHARING_WORKERS)
    return sorted({min(planned, at_once), planned} - {0, 1, 2})


def side_by_side_workers(most_workers: int, at_once: int) -> list[int]:
    """Numbers of workers of one host whose compute is measured side by side.

    Powers of two that the cores are enough for, and as many as are planned.
    """
    planned = min(most_workers, MOST_SHARING_WORKERS)
    powers = (2**power for power in range(planned.bit_length()))
    return sorted({1, planned, *(each for each in powers if each <= min(planned, at_once))})


def measure_side_by_side(
    runs: ShortRuns,
    out: Path,
    settings: Mapping[str, Any],
    step_seconds: float,
    most_workers: int,
    at_once: int,
) -> list[SideBySide]:
    """Train one worker alone, and several that compute at the same time and do not communicate.

    `settings` have the batch of a worker, which takes it `step_seconds` alone. The runs are
    removed: a calibration would take them for runs of the strategy.
    """
    if settings.get("precision") == "fp16":
        return []  # local_sgd does not support it
    points = []
    for workers in side_by_side_workers(most_workers, at_once):
        steps = run_steps(step_seconds * max(1.0, workers / at_once))
        own = {"batch_size": workers * settings["batch_size"], "iterations": steps}
        own["strategy"] = "single"
        if workers > 1:
            # Without an average before the end.
            own |= {"strategy": "local_sgd", "options": {"every": str(10 * steps)}}
            own["nproc_per_node"] = workers
        run = runs.train(out, f"side-by-side-{workers}", {**settings, **own})
        seconds = [each["iteration_seconds"]["mean"] for each in open_run(run).workers]
        points.append(SideBySide(workers, tuple(map(float, seconds))))
        shutil.rmtree(run)
    return points


def _tell(text: str) -> None:
    sys.stderr.write(f"paceline: {text} ...\n")
