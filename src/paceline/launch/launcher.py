"""Start a run, new or resumed, with the launcher that its configuration or environment asks for."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.config import RunConfig, fields, flag_of, from_mapping, option_of
from paceline.errors import CheckpointError, ConfigError, RecordsError, UsageError, shown
from paceline.launch import environment, node, worker
from paceline.launch.fork_server import ForkServer
from paceline.launch.remote import run as remote
from paceline.launch.result import RunOutcome
from paceline.launch.validation import validate
from paceline.records import RunFolder
from paceline.strategies.strategy import ServerStrategy
from paceline.training.checkpoint import iterations


def train(
    config: RunConfig, quiet: bool = False, fork_server: ForkServer | None = None
) -> RunOutcome:
    """Train in a new run folder; processes start faster from a fork server."""
    return _launch(config, None, quiet, fork_server)


def resume(
    path: str,
    changes: dict[str, Any],
    quiet: bool = False,
    fork_server: ForkServer | None = None,
) -> RunOutcome:
    """Resume a run from its newest checkpoint; `changes` are the flags set beside --resume.

    A run without a checkpoint restarts from iteration 0.
    """
    folder, config = resumable(path, changes)
    rank_info = environment.detect()
    is_first = config.node_rank == 0 and (rank_info is None or rank_info.rank == 0)
    if is_first and not quiet and not iterations(folder.checkpoints):
        sys.stderr.write(f"paceline: {path} has no checkpoint yet: starting from iteration 0\n")
    return _launch(config, folder, quiet, fork_server)


def resumable(path: str, changes: dict[str, Any]) -> tuple[RunFolder, RunConfig]:
    """The folder of a run that can be resumed, and its configuration with `changes`."""
    folder = RunFolder.open(path)
    config = resumed_config(folder.read_config(), changes, folder)
    if folder.is_finished and not changes:
        raise RecordsError(f"{path} is finished: increase --epochs or --iterations to continue it")
    # The other nodes get the checkpoint from node 0, which an elastic run determines later.
    is_first = config.node_rank == 0 and config.elastic is None
    if is_first and not iterations(folder.checkpoints):
        _check_can_restart(path, folder, config)
    return folder, config


def _check_can_restart(path: str, folder: RunFolder, config: RunConfig) -> None:
    # Raises if the result is damaged: without checkpoints it is all there is of the run.
    folder.read_result()
    if folder.is_finished:
        raise CheckpointError(
            f"{path} is finished and has no checkpoint: train it again under another --name"
        )
    if config.checkpoint_every == "never":
        raise CheckpointError(
            f"{path} has no checkpoint, because it was run without --checkpoint-every:"
            " set --checkpoint-every with --resume to restart it from iteration 0"
        )


def resumed_config(original: RunConfig, changes: dict[str, Any], folder: RunFolder) -> RunConfig:
    """The original configuration with `changes`; ConfigError if a resumed run cannot make them."""
    # The folder may have been moved since.
    values = {**original.to_dict(), "out": str(folder.path.parent), "name": folder.id}
    for one, other in (("epochs", "iterations"), ("batch_size", "batch_per_worker")):
        if one in changes and other not in changes:
            values[other] = None
        if other in changes and one not in changes:
            values[one] = None
    _remove_former_machines(values, changes)
    changed = from_mapping(changes, recorded=values)
    problems = [
        f"{flag_of(item.name)}: a resumed run keeps its {getattr(original, item.name)!r},"
        f" got {shown(getattr(changed, item.name))}"
        for item in fields()
        if item.name in changes
        and not option_of(item).mutable_on_resume
        and getattr(changed, item.name) != getattr(original, item.name)
    ]
    if changed.global_batch_size != original.global_batch_size:
        problems.append(
            f"--batch-per-worker: a resumed run keeps its global batch of"
            f" {original.global_batch_size}, got {changed.global_batch_size}"
        )
    if problems:
        raise ConfigError(problems)
    return changed


def _remove_former_machines(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """If a resumed run gets other machines, the recorded ones do not apply any more."""
    if "hosts" in changes or "cluster" in changes:
        obsolete = {"hosts", "cluster", "nnodes", "master_addr"}
    elif "nnodes" in changes:
        obsolete = {"hosts", "cluster"}
    else:
        obsolete = set()
    for name in obsolete - set(changes):
        values.pop(name, None)


def _launch(
    config: RunConfig, resumed: RunFolder | None, quiet: bool, fork_server: ForkServer | None
) -> RunOutcome:
    """Run on the machines that the configuration names, otherwise on this one."""
    is_worker = environment.detect() is not None
    if config.launcher == "ray" and not is_worker:
        return _launch_on_ray(config, resumed, quiet)
    if (config.hosts or config.cluster) and not is_worker:
        validate(config)
        return remote.run(config, resumed, quiet, fork_server)
    return launch_local(config, resumed, quiet, fork_server)


def launch_local(
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    fork_server: ForkServer | None = None,
) -> RunOutcome:
    """Run this node's workers, or be one of them if torchrun or srun started this process.

    Other nodes are commands of their own: `hosts` and `cluster` are only recorded.
    """
    rank_info = environment.detect()
    if rank_info is not None:
        _close(fork_server)
        return _run_worker(config, rank_info, resumed, quiet)
    strategy = validate(config)
    if config.elastic is not None:
        return _launch_elastic(config, resumed, quiet, fork_server)
    if config.workers == 1 and not isinstance(strategy, ServerStrategy):
        _close(fork_server)
        return worker.run(config, SINGLE_PROCESS, resumed, quiet)
    return node.run(config, resumed, quiet, fork_server)


def _close(fork_server: ForkServer | None) -> None:
    """A worker starts no processes, and the memory of its server would count as its own."""
    if fork_server is not None:
        fork_server.close()


def _launch_on_ray(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    # Imported here because Ray is optional and slow to load.
    from paceline.launch.ray import run as ray

    validate(config)
    return ray.run(config, resumed, quiet)


def _launch_elastic(
    config: RunConfig, resumed: RunFolder | None, quiet: bool, fork_server: ForkServer | None
) -> RunOutcome:
    # Imported here because torch's elastic agent is slow to load.
    from paceline.launch.elastic import run as elastic

    return elastic.run(config, resumed, quiet, fork_server)


def _run_worker(
    config: RunConfig, rank_info: RankInfo, resumed: RunFolder | None, quiet: bool
) -> RunOutcome:
    """Be one of the workers that torchrun or srun started; it has chosen the machines as well."""
    own = dataclasses.replace(
        config,
        nnodes=rank_info.nnodes,
        nproc_per_node=rank_info.local_world_size,
        hosts=(),
        cluster=None,
        elastic=None if resumed else config.elastic,
    )
    try:
        validate(own)
        if resumed is None and (config.hosts or config.cluster):
            raise ConfigError(
                ["--hosts, --cluster: start their own workers: use them without torchrun or srun"]
            )
        if own.elastic is not None:
            raise ConfigError(
                ["--elastic: starts its own workers: use it without torchrun or srun"]
            )
    except UsageError as error:
        error.already_reported = rank_info.rank > 0
        raise
    return worker.run(own, rank_info, resumed, quiet)
