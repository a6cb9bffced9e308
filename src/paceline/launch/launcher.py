"""Start a run, new or resumed, wherever its workers come from."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from paceline.config import RunConfig, fields, flag_of, from_mapping, option_of
from paceline.data import DATASETS
from paceline.errors import (
    CheckpointError,
    ConfigError,
    RecordsError,
    UnknownNameError,
    UsageError,
    shown,
)
from paceline.launch import alone, environment, node, remote, worker
from paceline.launch.result import RunOutcome
from paceline.launch.validation import check_elastic
from paceline.models import MODELS
from paceline.records import RunFolder
from paceline.strategies import STRATEGIES
from paceline.strategies.options import create_strategy
from paceline.strategies.strategy import ServerStrategy, Strategy
from paceline.training.checkpoint import iterations


def train(config: RunConfig, quiet: bool = False) -> RunOutcome:
    """Run a config in a new folder."""
    return _launch(config, None, quiet)


def resume(path: str, changes: dict[str, Any], quiet: bool = False) -> RunOutcome:
    """Go on with a run from its newest checkpoint; `changes` are flags given with --resume.

    A run that ended before its first checkpoint starts again from iteration 0.
    """
    folder, config = resumable(path, changes)
    place = environment.detect()
    is_first = config.node_rank == 0 and (place is None or place.rank == 0)
    if is_first and not quiet and not iterations(folder.checkpoints):
        sys.stderr.write(f"paceline: {path} has no checkpoint yet: starting from iteration 0\n")
    return _launch(config, folder, quiet)


def resumable(path: str, changes: dict[str, Any]) -> tuple[RunFolder, RunConfig]:
    """The folder of a run that can be gone on with, and its settings from then on."""
    folder = RunFolder.open(path)
    config = resumed_config(folder.read_config(), changes, folder)
    if folder.is_finished and not changes:
        raise RecordsError(f"{path} is finished: give more --epochs or --iterations to go on")
    # The other nodes get the checkpoint from the first one; who that is shows later, if elastic.
    is_first = config.node_rank == 0 and config.elastic is None
    if is_first and not iterations(folder.checkpoints):
        _check_can_start_again(path, folder, config)
    return folder, config


def _check_can_start_again(path: str, folder: RunFolder, config: RunConfig) -> None:
    # Without checkpoints a damaged result is all that there is: it is not for us to replace.
    folder.read_result()
    if folder.is_finished:
        raise CheckpointError(
            f"{path} is finished and has no checkpoint: train it again under another --name"
        )
    if config.checkpoint_every == "never":
        raise CheckpointError(
            f"{path} has no checkpoint: it was run without --checkpoint-every;"
            " give --checkpoint-every with --resume to start it again from iteration 0"
        )


def resumed_config(original: RunConfig, changes: dict[str, Any], folder: RunFolder) -> RunConfig:
    """The original config with the changes that a resumed run may make; others are refused."""
    # The folder may have been moved or be named from elsewhere since.
    values = {**original.to_dict(), "out": str(folder.path.parent), "name": folder.id}
    for one, other in (("epochs", "iterations"), ("batch_size", "batch_per_worker")):
        if one in changes and other not in changes:
            values[other] = None
        if other in changes and one not in changes:
            values[one] = None
    _forget_machines(values, changes)
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


def _forget_machines(values: dict[str, Any], changes: dict[str, Any]) -> None:
    """Where a resumed run gets other machines, those before have no say any more."""
    if "hosts" in changes or "cluster" in changes:
        gone = {"hosts", "cluster", "nnodes", "master_addr"}
    elif "nnodes" in changes:
        gone = {"hosts", "cluster"}
    else:
        gone = set()
    for name in gone - set(changes):
        values.pop(name, None)


def _launch(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    is_away = config.hosts or config.cluster or config.launcher == "ray"
    if not is_away or environment.detect() is not None:
        return launch_local(config, resumed, quiet)
    validate(config)
    if config.launcher == "ray":
        # Ray takes a while to load, and few want it.
        from paceline.launch.ray import run as ray

        return ray.run(config, resumed, quiet)
    return remote.run(config, resumed, quiet)


def launch_local(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Start the workers of this machine, or be one of them where somebody else has started it."""
    place = environment.detect()
    has_machines = place is not None and resumed is None and bool(config.hosts or config.cluster)
    if place is not None:
        # Whoever has started this one has chosen the machines as well.
        config = dataclasses.replace(
            config,
            nnodes=place.nnodes,
            nproc_per_node=place.local_world_size,
            hosts=(),
            cluster=None,
            elastic=config.elastic if resumed is None else None,
        )
    try:
        strategy = validate(config)
        if has_machines:
            raise ConfigError(
                ["--hosts, --cluster: start their own workers: give these without torchrun or srun"]
            )
        if place is not None and config.elastic is not None:
            raise ConfigError(
                ["--elastic: starts its own workers: give the command without torchrun or srun"]
            )
    except UsageError as error:
        error.already_reported = place is not None and place.rank > 0
        raise
    if place is not None:
        return worker.run(config, place, resumed, quiet)
    if config.elastic is not None:
        # torch's elastic agent takes a while to load, and few want it.
        from paceline.launch.elastic import run as elastic

        return elastic.run(config, resumed, quiet)
    if config.workers == 1 and not isinstance(strategy, ServerStrategy):
        return alone.run(config, resumed, quiet)
    return node.run(config, resumed, quiet)


def validate(config: RunConfig) -> Strategy:
    """Refuse what no worker could be built from, before any of them starts; gives the strategy.

    Misspelt names are told together; a user's own code is loaded one after the other.
    """
    problems = []
    for check, name in (
        (MODELS.check, config.model),
        (DATASETS.check, config.data),
        (STRATEGIES.check, config.strategy),
    ):
        try:
            check(name)
        except UnknownNameError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    MODELS.load(config.model)
    DATASETS.load(config.data)
    return check_strategy(config)


def check_strategy(config: RunConfig) -> Strategy:
    """The strategy, if its options are right and it can keep these workers in step."""
    strategy = create_strategy(config.strategy, config.options)
    if strategy.max_world_size is not None and config.workers > strategy.max_world_size:
        raise ConfigError(
            [
                f"--strategy {config.strategy}: trains {strategy.max_world_size} worker,"
                f" not {config.workers}: choose another with `paceline list strategies`"
            ]
        )
    if problems := strategy.check(config):
        raise ConfigError(problems)
    if config.elastic is not None:
        check_elastic(config, strategy)
    return strategy
