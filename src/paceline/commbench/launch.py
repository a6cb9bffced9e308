"""Run the benchmark: start workers on this machine or several, and return the record.

`measure` is the entry point of `paceline comm`, `run_task` that of each machine of `--hosts`,
`--cluster` or Ray.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from paceline.comm.rank_info import RankInfo
from paceline.commbench.progress import clear_line, progress_display
from paceline.commbench.record import RECORD_FILE
from paceline.commbench.spec import BenchmarkSpec, check_workers
from paceline.errors import PacelineError, RunError, StoppedError
from paceline.launch import environment
from paceline.launch.control_channel import NodeTask, send_status
from paceline.launch.signals import SignalMonitor, describe_exit
from paceline.launch.spawn import spawn
from paceline.records import SCHEMA, RunFolder, read_json, write_json

if TYPE_CHECKING:
    from paceline.launch.machines import Machines

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
"""Time for the other workers to report their errors after a first failure."""

Processes = dict[int, subprocess.Popen[bytes]]
"""By rank."""


def measure(spec: BenchmarkSpec, quiet: bool = False) -> dict[str, Any] | None:
    """Run the benchmark and return its record (commbench/record.py).

    Returns None in a process that is not the first worker. Under torchrun or srun this process is
    itself a worker; otherwise workers are started here, over ssh, in an emulated cluster or by Ray.
    """
    rank_info = environment.detect()
    if rank_info is not None:
        from paceline.commbench.runner import run

        try:
            with progress_display(quiet or rank_info.rank > 0) as show:
                return run(rank_info, spec, show)
        except PacelineError as error:
            error.already_reported = rank_info.rank > 0
            raise
    check_workers(spec.machines.workers)
    if spec.machines.launcher == "ray":
        return _measure_on_ray(spec, quiet)
    if spec.machines.hosts or spec.machines.cluster:
        from paceline.launch.remote import fleet_of

        machines = fleet_of(spec.machines, quiet)
        with SignalMonitor("measuring") as signals, machines as fleet:
            return _measure_on(fleet, spec, quiet, signals)
    return _measure_here(spec, quiet)


def _measure_on_ray(spec: BenchmarkSpec, quiet: bool) -> dict[str, Any]:
    from paceline.launch.ray.run import machines_for

    with machines_for(spec.machines, quiet) as (fleet, signals):
        machines = replace(spec.machines, master_port=fleet.free_port())
        return _measure_on(fleet, replace(spec, machines=machines), quiet, signals)


def _measure_on(
    fleet: Machines, spec: BenchmarkSpec, quiet: bool, signals: SignalMonitor
) -> dict[str, Any]:
    """Start workers on every machine of a fleet."""
    from paceline.launch.remote import master_address, run_tasks

    machines = replace(spec.machines, master_addr=master_address(spec.machines, fleet))

    def config_of(node: int) -> dict[str, Any]:
        # A node does not need to know how to reach the others.
        own = replace(machines, node_rank=node, hosts=(), cluster=None)
        return replace(spec, machines=own).to_dict()

    exits, _, error = run_tasks(fleet, signals, __name__, config_of, quiet=quiet)
    if error:
        raise error
    record = exits[0].news.get("record")
    if not isinstance(record, dict):
        raise RunError("the first machine ended without a record")
    return {**record, "plan": spec.to_dict()}


def run_task(task: NodeTask) -> None:
    """Run the benchmark on one of several machines (launch/node_main.py)."""
    record = _measure_here(BenchmarkSpec.from_dict(task.config), task.quiet)
    if record is not None:
        send_status(record=record)


def _measure_here(spec: BenchmarkSpec, quiet: bool) -> dict[str, Any] | None:
    """Run this machine's workers; returns the record on the first machine."""
    processes: Processes = {}
    with (
        SignalMonitor("measuring") as signals,
        tempfile.TemporaryDirectory(prefix="paceline-comm-") as name,
    ):
        folder = RunFolder(Path(name))
        # Referenced until all workers have ended: the server stops when the store is collected.
        store, port = _start_store(spec)
        try:
            _start_workers(spec, folder, quiet, port, processes)
            signals.raise_on_signal = False
            _wait_for_workers(processes, signals)
            return _outcome(folder, processes, signals)
        finally:
            _kill_workers(processes)
            if not quiet and 0 in processes and processes[0].returncode:
                clear_line()
            del store


def _start_store(spec: BenchmarkSpec) -> tuple[Any, int]:
    """The rendezvous store, which the first machine serves, and its port."""
    machines = spec.machines
    if machines.node_rank:
        return None, machines.master_port
    # Imports torch, which launchers on the other machines do not need.
    from paceline.comm.rendezvous import Rendezvous, port_of

    port = environment.store_port(machines, machines.nnodes)
    store = Rendezvous(
        0, 1, machines.master_addr, port, machines.rendezvous_seconds, name="comm/launcher"
    ).join()
    return store, port_of(store)


def _start_workers(
    spec: BenchmarkSpec, folder: RunFolder, quiet: bool, port: int, processes: Processes
) -> None:
    machines = spec.machines
    spec_file = folder.path / "spec.json"
    write_json(spec_file, {"schema": SCHEMA, "plan": spec.to_dict()})
    for local_rank in range(machines.nproc_per_node):
        rank = machines.node_rank * machines.nproc_per_node + local_rank
        rank_info = RankInfo(
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
            "paceline.commbench.runner",
            rank_info,
            [str(spec_file), str(folder.path), "quiet" if quiet else "shown"],
            folder.output_file(rank),
            shown=rank == 0,
        )


def _wait_for_workers(processes: Processes, signals: SignalMonitor) -> None:
    """Until all have ended, the grace period after a first failure is over, or Ctrl-C."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes.values()):
        if signals.received:
            return
        if deadline is None and any(process.poll() for process in processes.values()):
            deadline = monotonic() + GRACE_SECONDS
        if deadline is not None and monotonic() > deadline:
            return
        sleep(POLL_SECONDS)


def _outcome(
    folder: RunFolder, processes: Processes, signals: SignalMonitor
) -> dict[str, Any] | None:
    if signals.received:
        raise StoppedError(f"stopped by {signals.received[0].name}")
    failed = {rank: process.poll() for rank, process in processes.items() if process.poll() != 0}
    if failed:
        raise _failure(folder, failed)
    return read_json(folder.path / RECORD_FILE) if 0 in processes else None


def _failure(folder: RunFolder, failed: dict[int, int | None]) -> PacelineError:
    """The root cause, from the workers' failure records, exit codes and output, in this order."""
    # Imports torch, which launchers on other machines than the first do not need.
    from paceline.launch.termination import read_failure, root_cause

    reported = root_cause(filter(None, (read_failure(folder, rank) for rank in failed)))
    if reported and not reported.is_secondary:
        return reported.error()
    for rank, code in failed.items():
        if code is not None and code < 0:
            return RunError(describe_exit(f"rank {rank}", code, ""))
    if reported:
        return reported.error()
    rank, code = next(iter(failed.items()))
    output = folder.output_file(rank).read_text(errors="replace").strip()
    last_line = output.splitlines()[-1] if output else ""
    return RunError(describe_exit(f"rank {rank}", code or 0, last_line))


def _kill_workers(processes: Processes) -> None:
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    for process in processes.values():
        process.wait()
