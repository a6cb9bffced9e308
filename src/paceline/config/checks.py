"""What is wrong with a run's settings: each problem a line with its flag and what would do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paceline import cluster_spec
from paceline.config.option import flag_of, option_of
from paceline.values import convert

if TYPE_CHECKING:
    from paceline.config.run_config import RunConfig

LARGEST_COUNT = 2**63 - 1
"""Of any whole number: what torch can hold."""


def check_alone(item: dataclasses.Field[Any], value: Any) -> list[str]:
    """What is wrong with one field's value by itself."""
    option, flag = option_of(item), flag_of(item.name)
    for part in value if isinstance(value, tuple) else (value,):
        if option.choices and part not in option.choices:
            return [f"{flag}: must be one of {', '.join(option.choices)}, got {part!r}"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    wanted = []
    if option.minimum is not None and value < option.minimum:
        wanted.append(f"at least {option.minimum}")
    if option.above is not None and value <= option.above:
        wanted.append(f"above {option.above}")
    if option.below is not None and value >= option.below:
        wanted.append(f"below {option.below}")
    most = LARGEST_COUNT if option.maximum is None and isinstance(value, int) else option.maximum
    if most is not None and value > most:
        wanted.append(f"at most {most}")
    return [f"{flag}: must be {' and '.join(wanted)}, got {value}"] if wanted else []


def check_together(config: RunConfig) -> list[str]:
    """Fields that are fine alone and not beside each other."""
    problems = []
    if config.epochs is not None and config.iterations is not None:
        problems.append("--epochs and --iterations: give one of them, not both")
    if config.batch_size is not None and config.batch_per_worker is not None:
        problems.append("--batch-size and --batch-per-worker: give one of them, not both")
    elif config.global_batch_size < config.workers:
        problems.append(
            f"--batch-size: must be at least {config.workers}, one sample for each worker"
        )
    if config.node_rank >= config.nnodes:
        problems.append(
            f"--node-rank: must be below --nnodes ({config.nnodes}), got {config.node_rank}"
        )
    if config.nesterov and (config.optimizer != "sgd" or config.momentum == 0):
        problems.append("--nesterov: needs --optimizer sgd with a momentum above 0")
    if (config.schedule == "steps") != bool(config.lr_steps):
        problems.append("--lr-steps and --schedule steps: give both or neither")
    problems += [
        f"{flag_of(item.name)}: must not be empty"
        for item in dataclasses.fields(config)
        if getattr(config, item.name) == ""
    ]
    problems += _check_lr_steps(config.lr_steps)
    problems += _check_workers(config)
    problems += _check_machines(config)
    if config.name and not _is_plain(config.name):
        problems.append(f"--name: must be a plain folder name, got {config.name!r}")
    return problems


def _check_workers(config: RunConfig) -> list[str]:
    """Shares and slowness must be those of the workers that there are."""
    problems = []
    if config.shares and config.shares != ("auto",):
        numbers = [_number_or_none(text) for text in config.shares]
        if len(numbers) != config.workers or not all(number and number > 0 for number in numbers):
            problems.append(
                f"--shares: must be auto or {config.workers} numbers above 0, one for each"
                f" worker, got {','.join(config.shares)!r}"
            )
    for text in config.slow:
        rank, _, factor = text.partition("=")
        number = _number_or_none(factor)
        if not rank.isdecimal() or int(rank) >= config.workers or number is None or number < 1:
            problems.append(
                f"--slow: must be rank=factor with a rank below {config.workers} and a factor"
                f" of at least 1, got {text!r}"
            )
    return problems


def _check_machines(config: RunConfig) -> list[str]:
    """Machines that are started by us are counted by us."""
    if config.hosts and config.cluster:
        return ["--hosts and --cluster: give one of them, not both"]
    problems = []
    for flag, count in (("--hosts", len(config.hosts)), ("--cluster", nodes_in(config.cluster))):
        # Of an elastic run, not all of them need to take part at any time.
        is_wrong = config.nnodes != count if config.elastic is None else config.nnodes > count
        if count and is_wrong:
            problems.append(f"--nnodes: {flag} has {count} machines, got {config.nnodes}")
    if config.elastic is not None and config.elastic_limits is None:
        problems.append(f"--elastic: must be fewest:most such as 2:4, got {config.elastic!r}")
    return problems


def nodes_in(cluster: str | None) -> int:
    return cluster_spec.parse(cluster).nodes if cluster else 0


def _check_lr_steps(steps: tuple[str, ...]) -> list[str]:
    for step in steps:
        rate, _, epochs = step.partition(":")
        height, length = _number_or_none(rate), _number_or_none(epochs)
        if height is None or length is None or height < 0 or length <= 0:
            return [f"--lr-steps: must be rate:epochs pairs such as 1e-2:10,1e-3:10, got {step!r}"]
    return []


def _is_plain(name: str) -> bool:
    """Whether a text can be the name of one visible folder."""
    return bool(name) and name.isprintable() and "/" not in name and not name.startswith(".")


def _number_or_none(text: str) -> float | None:
    try:
        return float(convert(float, text))
    except ValueError:
        return None
