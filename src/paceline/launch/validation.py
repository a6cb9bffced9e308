"""What an elastic run cannot be asked for, told before any process starts."""

from __future__ import annotations

import dataclasses

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.strategies.strategy import ServerStrategy, Strategy


def check_elastic(config: RunConfig, strategy: Strategy) -> None:
    """Refuse what holds for a fixed number of workers only, or leaves nothing to go on from."""
    limits = config.elastic_limits
    assert limits is not None
    largest = limits[1] * config.nproc_per_node
    problems = []
    if config.batch_per_worker is not None:
        problems.append(
            "--batch-per-worker: an elastic run keeps its global batch when workers come and go:"
            " give --batch-size instead"
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
        problems.append(
            "--shares: numbers are for a fixed number of workers: use auto with --elastic"
        )
    if config.slow:
        problems.append("--slow: ranks change in an elastic run: leave it out with --elastic")
    # Worlds of other sizes can be imagined only once the above is mended.
    problems = problems or _of_strategy(config, strategy, limits, largest)
    if problems:
        raise ConfigError(problems)


def _of_strategy(
    config: RunConfig, strategy: Strategy, limits: tuple[int, int], largest: int
) -> list[str]:
    if strategy.max_world_size is not None and largest > strategy.max_world_size:
        return [
            f"--strategy {config.strategy}: trains {strategy.max_world_size} worker, and --elastic"
            f" {config.elastic} may have {largest}: choose another with `paceline list strategies`"
        ]
    if isinstance(strategy, ServerStrategy):
        return [
            f"--strategy {config.strategy}: its servers cannot be dealt to nodes that come and go:"
            " choose another with --elastic"
        ]
    anywhere = dataclasses.replace(config, node_rank=0, nnodes=1, hosts=(), cluster=None)
    worlds = [dataclasses.replace(anywhere, nnodes=count) for count in limits]
    return [*dict.fromkeys(line for world in worlds for line in strategy.check(world))]
