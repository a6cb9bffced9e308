"""A run on machines that this command starts: over ssh (`--hosts`) or emulated (`--cluster`).

A process on each node does what a user's command there would do. This process shows their output,
ends them together, and has all records at the end, like a run on this machine.
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
from paceline.config import RunConfig, RunSettings, cluster_spec
from paceline.emulation.state import cluster_record
from paceline.errors import PacelineError, RecordsError, RunError, StoppedError, UsageError
from paceline.launch.fork_server import ForkServer
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


def run(
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    fork_server: ForkServer | None = None,
) -> RunOutcome:
    with SignalMonitor() as signals, machines_of(config, quiet, fork_server) as machines:
        try:
            return run_on(machines, config, resumed, quiet, signals)
        finally:
            # A signal must not interrupt removing the machines.
            signals.raise_on_signal = False


@contextlib.contextmanager
def machines_of(
    config: RunConfig, quiet: bool = False, fork_server: ForkServer | None = None
) -> Iterator[Machines]:
    """The machines that a configuration names or describes, for the duration of the block."""
    if config.hosts:
        yield SshMachines(config.hosts)
        return
    # Imported here because runs on real machines do not need it.
    from paceline.emulation.cluster import EmulatedCluster
    from paceline.launch.remote.machines import EmulatedMachines

    spec = cluster_spec.parse_recorded(config.cluster or "")
    with EmulatedCluster.for_run(spec, quiet) as cluster:
        yield EmulatedMachines(cluster, fork_server)


def run_on(
    machines: Machines,
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    signals: SignalMonitor,
) -> RunOutcome:
    # Node 0 makes the folder if it shares it.
    folder = resumed or RunFolder.unused(config)
    config = _common_config(config, machines, folder)
    with contextlib.ExitStack() as stack:
        if resumed:
            stack.enter_context(folder.locked())
            if folder.readable_result() is None:
                folder.archive_result()
            if upload(machines, 0, _path(config), folder):
                # Node 0 locks the same folder.
                stack.close()
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
        _download_records(machines, config, folder, before, exits[0], error)
    except StoppedError:
        raise StoppedError(
            f"stopped before all records were downloaded from {machines.addresses[0]}"
        ) from None
    if error is None:
        result = _new_result(folder, before)
        if result is None:
            raise RunError(f"the run ended without a result in {folder.path}")
        return RunOutcome(folder, result, 0)
    has_trained = _has_trained(config, folder, before, error)
    if has_trained:
        is_recorded = bool(failure and failure.error_message)
        result = _result_of_failure(
            config, folder, before, error, is_recorded, machines.cluster_file
        )
    # If node 0 rejected the run, the folder may belong to another run.
    if has_trained or not exits[0].error_message:
        _remove_leftovers(config, folder, is_untrained=resumed is None and not has_trained)
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


def _common_config(config: RunConfig, machines: Machines, folder: RunFolder) -> RunConfig:
    """The configuration for all nodes, with the run folder and the address of node 0."""
    out = folder.path.parent
    # The current folder may have another path on the hosts.
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


def _download_records(
    machines: Machines,
    config: RunConfig,
    folder: RunFolder,
    before: Result | None,
    first: NodeExit,
    error: PacelineError | None,
) -> None:
    """Download the records from node 0, which has those of all; without it, from the others.

    `before`: the previous result of a resumed run.
    """
    is_shared = folder.config_file.is_file() and first.status.get("identity") == folder.identity()
    if is_shared or isinstance(error, UsageError):
        return
    try:
        download(machines, 0, _path(config), folder)
    except StoppedError:
        raise
    except PacelineError as problem:
        if error is None:
            where = f"{machines.addresses[0]}:{_path(config)}"
            raise RunError(f"the run is finished, its records are in {where}: {problem}") from None
    if error is None or _new_result(folder, before) is not None:
        return
    for node in range(1, len(machines.addresses)):
        with contextlib.suppress(RunError, RecordsError):
            download(machines, node, _path(config), folder, replace=False)


def _new_result(folder: RunFolder, before: Result | None) -> Result | None:
    """The result, unless it is the previous one of a resumed run."""
    result = folder.read_result() if folder.config_file.is_file() else None
    return None if result == before else result


def _has_trained(
    config: RunConfig, folder: RunFolder, before: Result | None, error: PacelineError
) -> bool:
    """Whether training began, so that there is something to record."""
    if isinstance(error, UsageError):
        return False
    if before is not None and isinstance(error, StoppedError):
        # A resumed run has events in any case.
        return _new_result(folder, before) is not None
    return any(folder.events_file(rank).exists() for rank in range(config.workers))


def _result_of_failure(
    config: RunConfig,
    folder: RunFolder,
    before: Result | None,
    error: PacelineError,
    is_recorded: bool,
    cluster_file: str | None,
) -> Result:
    """`is_recorded`: the nodes reported the error, so their result has the cause."""
    result = _new_result(folder, before)
    if result is None:
        folder.archive_result()
        status = "stopped" if isinstance(error, StoppedError) else "failed"
        reports = read_reports(folder, range(config.workers))
        termination = Termination(str(error), error.exit_code, status)
        cluster = cluster_record(cluster_file) if cluster_file else None
        more = {"cluster": cluster} if cluster else {}
        result = write_result(RunSettings.of(config), folder, reports, termination, **more)
    elif not is_recorded:
        # The nodes know only its consequences.
        result |= {"status": "failed", "cause": str(error)}
        folder.write_result(result)
    return result


def _remove_leftovers(config: RunConfig, folder: RunFolder, is_untrained: bool) -> None:
    """Remove what killed nodes left behind; `is_untrained`: the whole folder."""
    folder.remove_transient()
    if is_untrained:
        resources = map(folder.resources_file, range(config.nnodes))
        folder.discard([*resources, *folder.path.glob("output-*.txt")])
