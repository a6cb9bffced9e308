"""A run on machines that this command starts: over ssh (`--hosts`) or emulated (`--cluster`).

A node process on each of them does what a command given there by hand would do. This one shows what
they say, ends them together, and has all records at the end, as if the run had been here.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.config import RunConfig, cluster_spec
from paceline.emulation.state import cluster_record
from paceline.errors import PacelineError, RecordsError, RunError, StoppedError, UsageError
from paceline.launch.record_collection import read_reports
from paceline.launch.remote.control_channel import TRAIN, NodeExit, NodeTask
from paceline.launch.remote.folder_transfer import download, upload
from paceline.launch.remote.machines import Machines, NodeExits, run_on_nodes
from paceline.launch.remote.ssh import SshMachines
from paceline.launch.result import RunOutcome, write_result
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import Termination
from paceline.records import Result, RunFolder

LOOPBACK = "127.0.0.1"


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    with SignalMonitor() as signals, machines_of(config, quiet) as machines:
        try:
            return run_on(machines, config, resumed, quiet, signals)
        finally:
            # The machines are taken down in peace.
            signals.raise_on_signal = False


@contextlib.contextmanager
def machines_of(config: RunConfig, quiet: bool = False) -> Iterator[Machines]:
    """The machines that a config names or describes, for as long as the block lasts."""
    if config.hosts:
        yield SshMachines(config.hosts)
        return
    # Only here, since it is of no use to those who have machines.
    from paceline.emulation.cluster import EmulatedCluster
    from paceline.launch.remote.machines import EmulatedMachines

    spec = cluster_spec.parse_recorded(config.cluster or "")
    with EmulatedCluster.up(spec, quiet=quiet) as cluster:
        yield EmulatedMachines(cluster)


def run_on(
    machines: Machines,
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    signals: SignalMonitor,
) -> RunOutcome:
    # Node 0 makes the folder if it shares it.
    folder = resumed or RunFolder.unused(config)
    config = _settle(config, machines, folder)
    with contextlib.ExitStack() as held:
        if resumed:
            held.enter_context(folder.locked())
            if folder.readable_result() is None:
                folder.archive_result()
            if upload(machines, 0, _path(config), folder):
                # The first node locks the same folder.
                held.close()
        return _run_on_locked(machines, config, folder, resumed, quiet, signals)


def _run_on_locked(
    machines: Machines,
    config: RunConfig,
    folder: RunFolder,
    resumed: RunFolder | None,
    quiet: bool,
    signals: SignalMonitor,
) -> RunOutcome:
    before = folder.read_result() if resumed else None
    exits, failure, error = run_tasks(
        machines,
        signals,
        TRAIN,
        lambda node: replace(config, node_rank=node).to_dict(),
        is_resumed=resumed is not None,
        quiet=quiet,
        min_nodes=config.elastic_limits[0] if config.elastic_limits else None,
    )
    try:
        signals.raise_on_signal = True
        _bring_home(machines, config, folder, before, exits[0], error)
    except StoppedError:
        raise StoppedError(
            f"stopped before all records had come from {machines.addresses[0]}"
        ) from None
    if error is None:
        result = _new_result(folder, before)
        if result is None:
            raise RunError(f"the run ended without a result in {folder.path}")
        return RunOutcome(folder, result, 0)
    has_trained = _has_trained(config, folder, before, error)
    if has_trained:
        is_told = bool(failure and failure.error_message)
        result = _result_of_failure(config, folder, before, error, is_told, machines.cluster_file)
    # A first node that refused to begin may have found another run's folder in its place.
    if has_trained or not exits[0].error_message:
        _clear(config, folder, is_void=resumed is None and not has_trained)
    if not has_trained:
        raise error
    return RunOutcome(folder, result, error.exit_code)


def run_tasks(
    machines: Machines,
    signals: SignalMonitor,
    program: str,
    config_of: Callable[[int], dict[str, Any]],
    *,
    is_resumed: bool = False,
    quiet: bool,
    min_nodes: int | None = None,
) -> NodeExits:
    """Run a program (launch/remote/node_main.py) on each node, with the node's configuration."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def request(node: int) -> bytes:
        task = NodeTask(__version__, program, config_of(node), is_resumed, quiet, columns)
        return task.to_bytes()

    argv = [machines.python, "-m", "paceline.launch.remote.node_main"]
    return run_on_nodes(machines, lambda _: argv, request, signals, min_nodes)


def master_address(config: RunConfig, machines: Machines) -> str:
    """The address of node 0 for the other nodes, which may know it by another name than ssh."""
    if config.hosts and config.master_addr != LOOPBACK:
        return config.master_addr
    return machines.addresses[0]


def _settle(config: RunConfig, machines: Machines, folder: RunFolder) -> RunConfig:
    """What all nodes have in common, where the run is and where they meet included."""
    out = folder.path.parent
    # The hosts may have the current folder elsewhere.
    with contextlib.suppress(ValueError):
        out = out.absolute().relative_to(Path.cwd())
    return replace(
        config,
        nnodes=len(machines.addresses),
        node_rank=0,
        master_addr=master_address(config, machines),
        out=str(out),
        name=folder.id,
    )


def _path(config: RunConfig) -> str:
    return str(Path(config.out) / (config.name or ""))


def _bring_home(
    machines: Machines,
    config: RunConfig,
    folder: RunFolder,
    before: Result | None,
    first: NodeExit,
    error: PacelineError | None,
) -> None:
    """Get the records from the first node, which has those of all; without it, from the others.

    `before`: what a resumed run said of itself until now.
    """
    is_here = folder.config_file.is_file() and first.status.get("identity") == folder.identity()
    if is_here or isinstance(error, UsageError):
        return
    try:
        download(machines, 0, _path(config), folder)
    except StoppedError:
        raise
    except PacelineError as trouble:
        if error is None:
            where = f"{machines.addresses[0]}:{_path(config)}"
            raise RunError(f"the run is finished, its records are in {where}: {trouble}") from None
    if error is None or _new_result(folder, before) is not None:
        return
    for node in range(1, len(machines.addresses)):
        with contextlib.suppress(RunError, RecordsError):
            download(machines, node, _path(config), folder, replace=False)


def _new_result(folder: RunFolder, before: Result | None) -> Result | None:
    """`before`: what a resumed run said of itself until now."""
    result = folder.read_result() if folder.config_file.is_file() else None
    return None if result == before else result


def _has_trained(
    config: RunConfig, folder: RunFolder, before: Result | None, error: PacelineError
) -> bool:
    """Whether there is something to account for, since nobody refused the run before it began."""
    if isinstance(error, UsageError):
        return False
    if before is not None and isinstance(error, StoppedError):
        # The events of a resumed run are there anyway.
        return _new_result(folder, before) is not None
    return any(folder.events_file(rank).exists() for rank in range(config.workers))


def _result_of_failure(
    config: RunConfig,
    folder: RunFolder,
    before: Result | None,
    error: PacelineError,
    is_told: bool,
    cluster_file: str | None,
) -> Result:
    """`is_told`: by the nodes, so that they have written it down where they could."""
    result = _new_result(folder, before)
    if result is None:
        folder.archive_result()
        status = "stopped" if isinstance(error, StoppedError) else "failed"
        reports = read_reports(folder, range(config.workers))
        termination = Termination(str(error), error.exit_code, status)
        cluster = cluster_record(cluster_file) if cluster_file else None
        more = {"cluster": cluster} if cluster else {}
        result = write_result(config, folder, reports, termination, **more)
    elif not is_told:
        # The nodes have seen only what came of it.
        result |= {"status": "failed", "cause": str(error)}
        folder.write_result(result)
    return result


def _clear(config: RunConfig, folder: RunFolder, is_void: bool) -> None:
    """What nodes could not remove when they were killed; `is_void`: all, as nobody has trained."""
    folder.remove_transient()
    if is_void:
        resources = map(folder.resources_file, range(config.nnodes))
        folder.discard([*resources, *folder.path.glob("output-*.txt")])
