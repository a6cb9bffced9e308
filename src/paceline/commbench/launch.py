"""How far the measuring has come: a live line on a terminal, a line now and then elsewhere.

The workers of this machine, from their start to their end.

Measure, wherever the workers come from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.comm.rank_info import RankInfo
from paceline.commbench.spec import BenchmarkSpec, check_workers
from paceline.errors import PacelineError, RunError, StoppedError
from paceline.launch import environment
from paceline.launch.signals import SignalMonitor, signal_name
from paceline.launch.spawn import spawn
from paceline.launch.termination import read_failure, root_cause
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.training.display import COLUMNS_VARIABLE

if TYPE_CHECKING:
    from paceline.launch.machines import Machines

QUIET_SECONDS = 10.0
_CLEAR_LINE = "\r\x1b[2K"

Show = Callable[[str, int, int], None]
"""Told what comes next, how many sizes are done, and of how many."""


@contextmanager
def showing(quiet: bool) -> Iterator[Show]:
    """Shown only between sizes: a thread of its own would disturb what is measured."""
    if quiet:
        yield lambda text, done, total: None
    elif _is_live():
        yield lambda text, done, total: _write(f"{_CLEAR_LINE}{_describe(text, done, total)}")
        clear()
    else:
        yield _now_and_then()


def clear() -> None:
    """Take away a live line, perhaps that of a process that could not do so itself."""
    if _is_live():
        _write(_CLEAR_LINE)


def _is_live() -> bool:
    return COLUMNS_VARIABLE in os.environ or sys.stdout.isatty()


def _now_and_then() -> Show:
    spoke = time.monotonic()

    def show(text: str, done: int, total: int) -> None:
        nonlocal spoke
        if time.monotonic() - spoke > QUIET_SECONDS:
            spoke = time.monotonic()
            _write(f"{_describe(text, done, total)}\n")

    return show


def _describe(text: str, done: int, total: int) -> str:
    return f"measuring {text} ({done} of {total} sizes done)"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""What the others get, after a first failure, to say what they know of it."""

Processes = dict[int, subprocess.Popen[bytes]]


def run_here(plan: BenchmarkSpec, quiet: bool) -> dict[str, Any] | None:
    """Start this machine's workers and wait for them; on the first machine, their record."""
    processes: Processes = {}
    with (
        SignalMonitor("measuring") as interruptions,
        tempfile.TemporaryDirectory(prefix="paceline-comm-") as name,
    ):
        folder = RunFolder(Path(name))
        # Kept until all have ended: what it serves ends with it.
        store, port = _serve(plan)
        try:
            _start(plan, folder, quiet, port, processes)
            interruptions.raise_on_signal = False
            _watch(processes, interruptions)
            return _outcome(folder, processes, interruptions)
        finally:
            _end(processes)
            if not quiet and 0 in processes and processes[0].returncode:
                clear()
            del store


def _serve(plan: BenchmarkSpec) -> tuple[Any, int]:
    """The store at which all workers meet, on the first machine; and its port everywhere."""
    machines = plan.machines
    if machines.node_rank:
        return None, machines.master_port
    # Loads torch, which the other machines' launchers need not.
    from paceline.comm.rendezvous import Rendezvous, port_of

    # No other machine has to know the port on one machine.
    port = 0 if machines.nnodes == 1 else machines.master_port
    store = Rendezvous(
        0, 1, machines.master_addr, port, machines.rendezvous_seconds, name="comm/launcher"
    ).join()
    return store, port_of(store)


def _start(
    plan: BenchmarkSpec, folder: RunFolder, quiet: bool, port: int, processes: Processes
) -> None:
    machines = plan.machines
    plan_file = folder.path / "plan.json"
    write_json(plan_file, {"schema": SCHEMA, "plan": plan.to_dict()})
    for local_rank in range(machines.nproc_per_node):
        rank = machines.node_rank * machines.nproc_per_node + local_rank
        place = RankInfo(
            rank=rank,
            world_size=machines.workers,
            local_rank=local_rank,
            local_world_size=machines.nproc_per_node,
            node=machines.node_rank,
            nnodes=machines.nnodes,
            master_addr=machines.master_addr,
            master_port=port,
            has_external_store=True,
        )
        processes[rank] = spawn(
            "paceline.commbench.worker",
            place,
            [str(plan_file), str(folder.path), "quiet" if quiet else "shown"],
            _output_file(folder, rank),
            shown=rank == 0,
        )


def _watch(processes: Processes, interruptions: SignalMonitor) -> None:
    """Until all have ended, one has failed and the others had time to notice, or Ctrl-C."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes.values()):
        if interruptions.received:
            return
        if deadline is None and any(process.poll() for process in processes.values()):
            deadline = monotonic() + GRACE_SECONDS
        if deadline is not None and monotonic() > deadline:
            return
        sleep(POLL_SECONDS)


def _outcome(
    folder: RunFolder, processes: Processes, interruptions: SignalMonitor
) -> dict[str, Any] | None:
    from paceline.commbench.worker import RECORD

    if interruptions.received:
        raise StoppedError(f"stopped by {interruptions.received[0].name}")
    failed = {rank: process.poll() for rank, process in processes.items() if process.poll() != 0}
    if failed:
        raise _explain(folder, failed)
    return read_json(folder.path / RECORD) if 0 in processes else None


def _explain(folder: RunFolder, failed: dict[int, int | None]) -> PacelineError:
    known = root_cause(filter(None, (read_failure(folder, rank) for rank in failed)))
    if known and not known.is_secondary:
        return known.error()
    for rank, code in failed.items():
        if code is not None and code < 0:
            return RunError(f"rank {rank} was killed by {signal_name(code)}")
    if known:
        return known.error()
    rank, code = next(iter(failed.items()))
    text = _output_file(folder, rank).read_text(errors="replace").strip()
    said = text.splitlines()[-1] if text else "it said nothing"
    return RunError(f"rank {rank} ended with exit code {code}: {said}")


def _output_file(folder: RunFolder, rank: int) -> Path:
    return folder.path / f"output-{rank}.txt"


def _end(processes: Processes) -> None:
    running: Sequence[subprocess.Popen[bytes]] = list(processes.values())
    for process in running:
        if process.poll() is None:
            process.kill()
    for process in running:
        process.wait()


def measure(plan: BenchmarkSpec, quiet: bool = False) -> dict[str, Any] | None:
    """The record (commbench/record.py); None where another process has it.

    In this process where it is one of several workers (torchrun, srun), or else in workers that are
    started here, over ssh, in an emulated cluster or by Ray.
    """
    place = environment.detect()
    if place is not None:
        from paceline.commbench.runner import run

        try:
            with showing(quiet or place.rank > 0) as show:
                return run(place, plan, show)
        except PacelineError as error:
            error.already_reported = place.rank > 0
            raise
    check_workers(plan.machines.workers)
    if plan.machines.launcher == "ray":
        return _measure_on_ray(plan, quiet)
    if plan.machines.hosts or plan.machines.cluster:
        from paceline.launch.remote import fleet_of
        from paceline.launch.signals import SignalMonitor

        machines = fleet_of(plan.machines, quiet)
        with SignalMonitor("measuring") as interruptions, machines as fleet:
            return measure_on(fleet, plan, quiet, interruptions)

    return run_here(plan, quiet)


def _measure_on_ray(plan: BenchmarkSpec, quiet: bool) -> dict[str, Any]:
    from paceline.launch.ray.run import machines_for

    with machines_for(plan.machines, quiet) as (fleet, interruptions):
        machines = replace(plan.machines, master_port=fleet.free_port())
        return measure_on(fleet, replace(plan, machines=machines), quiet, interruptions)


def measure_on(
    fleet: Machines, plan: BenchmarkSpec, quiet: bool, interruptions: SignalMonitor
) -> dict[str, Any]:
    """With workers on every machine of a fleet."""
    from paceline.launch.machines import NodeSupervisor, error_of, first_failure
    from paceline.launch.node_main import NodeTask
    from paceline.launch.remote import LOOPBACK

    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    machines = plan.machines
    if not (machines.hosts and machines.master_addr != LOOPBACK):
        machines = replace(machines, master_addr=fleet.addresses[0])

    def task(node: int) -> bytes:
        # A node is told its place, and need not know how the others are reached.
        own = replace(plan, machines=replace(machines, node_rank=node, hosts=(), cluster=None))
        return NodeTask(__version__, own.to_dict(), False, quiet, columns).to_bytes()

    words = [fleet.python, "-m", "paceline.commbench.node"]
    with NodeSupervisor(fleet, interruptions) as watch:
        ends = watch.run(lambda _: words, task)
    if failure := first_failure(ends):
        raise error_of(fleet, failure, ends)
    record = ends[0].news.get("record")
    if not isinstance(record, dict):
        raise RunError("the first machine ended without a record")
    return {**record, "plan": plan.to_dict()}
