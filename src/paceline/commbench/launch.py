"""Run the benchmark: start workers on this machine or several, and return the record.

`measure` is the entry point of `paceline comm`, `run_task` that of each machine of `--hosts`,
`--cluster` or Ray.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any

from paceline.comm.rank_info import RankInfo
from paceline.commbench.progress import clear_line, progress_display
from paceline.commbench.record import RECORD_FILE
from paceline.commbench.spec import BenchmarkSpec, check_workers
from paceline.errors import PacelineError, RunError, StoppedError
from paceline.launch import environment
from paceline.launch.fork_server import ForkServer
from paceline.launch.processes import POLL_SECONDS, LocalProcesses
from paceline.launch.remote.control_channel import LauncherWatch, NodeTask, send_status
from paceline.launch.signals import SignalMonitor
from paceline.records import SCHEMA, RunFolder, read_json, write_json

if TYPE_CHECKING:
    from paceline.launch.remote.machines import Machines


def measure(
    spec: BenchmarkSpec, quiet: bool = False, fork_server: ForkServer | None = None
) -> dict[str, Any] | None:
    """Run the benchmark and return its record (commbench/record.py).

    Returns None in a process that is not the first worker. Under torchrun or srun this process is
    itself a worker; otherwise workers are started here, over ssh, in an emulated cluster or by Ray.
    Those of this machine start from `fork_server`, if there is one.
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
        from paceline.launch.remote.run import machines_of

        with (
            SignalMonitor("measuring") as signals,
            machines_of(spec.machines, quiet, fork_server) as machines,
        ):
            return _measure_on(machines, spec, quiet, signals)
    return _measure_here(spec, quiet, fork_server)


def _measure_on_ray(spec: BenchmarkSpec, quiet: bool) -> dict[str, Any]:
    from paceline.launch.ray.run import machines_for

    with machines_for(spec.machines, quiet) as (machines, signals):
        config = replace(spec.machines, master_port=machines.free_port())
        return _measure_on(machines, replace(spec, machines=config), quiet, signals)


def _measure_on(
    machines: Machines, spec: BenchmarkSpec, quiet: bool, signals: SignalMonitor
) -> dict[str, Any]:
    """Run the benchmark on several machines."""
    from paceline.launch.remote.run import master_address, run_tasks

    config = replace(spec.machines, master_addr=master_address(spec.machines, machines))

    def config_of(node: int) -> dict[str, Any]:
        # A node does not need to know how to reach the others.
        own = replace(config, node_rank=node, hosts=(), cluster=None)
        return replace(spec, machines=own).to_dict()

    exits, _, error = run_tasks(machines, signals, __name__, config_of, quiet=quiet)
    if error:
        raise error
    record = exits[0].status.get("record")
    if not isinstance(record, dict):
        raise RunError("the first machine ended without a record")
    return {**record, "plan": spec.to_dict()}


def run_task(task: NodeTask, watch: LauncherWatch) -> None:
    """Run the benchmark on one of several machines (launch/remote/node_main.py)."""
    import_module("paceline.commbench.runner")
    with watch.pausing():
        server = ForkServer.fork()
    with server or nullcontext() as fork_server:
        record = _measure_here(BenchmarkSpec.from_dict(task.config), task.quiet, fork_server)
    if record is not None:
        send_status(record=record)


def _measure_here(
    spec: BenchmarkSpec, quiet: bool, fork_server: ForkServer | None
) -> dict[str, Any] | None:
    """Run this machine's workers; returns the record on the first machine."""
    with (
        SignalMonitor("measuring") as signals,
        tempfile.TemporaryDirectory(prefix="paceline-comm-") as name,
    ):
        folder = RunFolder(Path(name))
        # Referenced until all workers have ended: the server stops when the store is collected.
        store, port = _start_store(spec)
        try:
            with LocalProcesses(
                folder, spec.machines.workers, fork_server=fork_server
            ) as processes:
                _start_workers(spec, quiet, port, processes)
                signals.raise_on_signal = False
                codes = _wait_for_workers(processes, signals)
        finally:
            del store
        if not quiet and codes.get(0, 0) != 0:
            clear_line()
        if signals.received:
            raise StoppedError(f"stopped by {signals.received[0].name}")
        if any(codes.values()):
            raise _failure(processes, codes)
        return None if spec.machines.node_rank else read_json(folder.path / RECORD_FILE)


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


def _start_workers(spec: BenchmarkSpec, quiet: bool, port: int, processes: LocalProcesses) -> None:
    machines = spec.machines
    folder = processes.folder.path
    spec_file = folder / "spec.json"
    write_json(spec_file, {"schema": SCHEMA, "plan": spec.to_dict()})
    for local_rank in range(machines.nproc_per_node):
        rank_info = RankInfo(
            rank=machines.node_rank * machines.nproc_per_node + local_rank,
            world_size=machines.workers,
            local_rank=local_rank,
            local_world_size=machines.nproc_per_node,
            node_rank=machines.node_rank,
            nnodes=machines.nnodes,
            master_addr=machines.master_addr,
            master_port=port,
            has_external_store=True,
        )
        arguments = [str(spec_file), str(folder), "quiet" if quiet else "shown"]
        processes.start("comm worker", rank_info, arguments)


def _wait_for_workers(processes: LocalProcesses, signals: SignalMonitor) -> dict[int, int | None]:
    """Exit codes, once all have ended; the first failure or signal ends the others."""
    while None in (codes := processes.codes()).values():
        if signals.received:
            return processes.terminate(0.0)
        if any(codes.values()):
            return processes.terminate()
        sleep(POLL_SECONDS)
    return codes


def _failure(processes: LocalProcesses, codes: dict[int, int | None]) -> PacelineError:
    from paceline.launch.termination import root_cause

    cause = processes.exit_cause(codes, root_cause(processes.reported_failures()))
    assert cause is not None
    return cause.error()
