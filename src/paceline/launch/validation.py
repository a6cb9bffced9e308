"""Checks of a configuration that need models, datasets and strategies, before a process starts."""

from __future__ import annotations

import dataclasses

from paceline.config import RunConfig
from paceline.data import DATASETS
from paceline.errors import ConfigError, UnknownNameError
from paceline.models import MODELS
from paceline.models.build import model_options
from paceline.strategies import STRATEGIES, create_strategy
from paceline.strategies.strategy import ServerStrategy, Strategy
from paceline.training import METRICS


def validate(config: RunConfig) -> Strategy:
    """Raise UsageError if no worker could be built from a configuration; returns its strategy.

    All unknown names are reported at once.
    """
    problems = []
    for check, name in (
        (MODELS.check, config.model),
        (DATASETS.check, config.data),
        (STRATEGIES.check, config.strategy),
        *((METRICS.check, name) for name in config.metrics),
    ):
        try:
            check(name)
        except UnknownNameError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    MODELS.load(config.model)
    DATASETS.load(config.data)
    for name in config.metrics:
        METRICS.load(name)
    return check_parts(config)


def check_parts(config: RunConfig) -> Strategy:
    """The strategy, if the options of model and strategy are valid and it supports the config."""
    problems: list[str] = []
    try:
        model_options(config.model, config.model_options)
    except ConfigError as error:
        problems += error.problems
    try:
        strategy = check_strategy(config)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    return strategy


def check_strategy(config: RunConfig) -> Strategy:
    """The strategy, if its options are valid and it supports the configuration."""
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


def check_elastic(config: RunConfig, strategy: Strategy) -> None:
    """Reject settings that need a fixed number of workers, and runs that could not restart."""
    limits = config.elastic_limits
    assert limits is not None
    largest = limits[1] * config.nproc_per_node
    problems = []
    if config.batch_per_worker is not None:
        problems.append(
            "--batch-per-worker: an elastic run keeps its global batch when the number of workers"
            " changes: use --batch-size"
        )
    elif config.global_batch_size < largest:
        problems.append(
            f"--batch-size: must be at least {largest}, one sample for each worker of"
            f" --elastic {config.elastic}"
        )
    if config.checkpoint_every == "never":
        problems.append(
            "--elastic: restarts need checkpoints: add --checkpoint-every, such as"
            " --checkpoint-every 50"
        )
    if config.shares and config.shares != ("auto",):
        problems.append("--shares: numbers need a fixed number of workers: use auto with --elastic")
    if config.slow:
        problems.append("--slow: ranks change in an elastic run: remove it")
    # Configurations of other sizes can be built only if the above is valid.
    problems = problems or _strategy_problems(config, strategy, limits, largest)
    if problems:
        raise ConfigError(problems)


def _strategy_problems(
    config: RunConfig, strategy: Strategy, limits: tuple[int, int], largest: int
) -> list[str]:
    if strategy.max_world_size is not None and largest > strategy.max_world_size:
        return [
            f"--strategy {config.strategy}: trains {strategy.max_world_size} worker, and --elastic"
            f" {config.elastic} may have {largest}: choose another with `paceline list strategies`"
        ]
    if isinstance(strategy, ServerStrategy):
        return [
            f"--strategy {config.strategy}: its servers need a fixed set of nodes:"
            " choose another with --elastic"
        ]
    anywhere = dataclasses.replace(config, node_rank=0, nnodes=1, hosts=(), cluster=None)
    worlds = [dataclasses.replace(anywhere, nnodes=count) for count in limits]
    return [*dict.fromkeys(line for world in worlds for line in strategy.check(world))]
