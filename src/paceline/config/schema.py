"""Metadata of settings, and the validation of their values.

Each problem is one line with the flag and the valid values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.config import cluster_spec
from paceline.config.conversion import LARGEST_INTEGER, Limits, convert
from paceline.errors import shown

if TYPE_CHECKING:
    from paceline.config.run_config import RunConfig

MOST_MACHINES = 10_000
MOST_EPOCHS = 10**6
HIGHEST_RATE = 1e9
SHARE = Limits(minimum=1e-6, maximum=1e6)
SLOWNESS = Limits(minimum=1, maximum=1000)
SHORTEST_SAMPLE_SECONDS = 0.01


GROUPS = {
    "task": "Model and data",
    "budget": "Training length and batch size",
    "optimizer": "Optimizer and learning rate",
    "numerics": "Numerics and hardware",
    "strategy": "Gradient synchronization",
    "processes": "Processes",
    "checkpoints": "Checkpoints",
    "records": "Records",
}


@dataclass(frozen=True, slots=True)
class Option:
    group: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """An exclusive lower limit."""
    below: float | None = None
    """An exclusive upper limit."""
    input_minimum: float | None = None
    """For new input; recorded runs may be below it."""
    input_maximum: float | None = None
    """For new input; recorded runs may be above it."""
    mutable_on_resume: bool = False
    """Whether a resumed run may change it."""
    is_in_checkpoints: bool = True
    """Whether checkpoints contain it, for comparison on resume, if it is immutable."""
    short: str | None = None
    """A one-letter flag."""

    @property
    def limits(self) -> Limits:
        """Limits of all runs."""
        is_whole = self.maximum is None and isinstance(self.input_maximum, int)
        maximum = LARGEST_INTEGER if is_whole else self.maximum
        return Limits(self.minimum, maximum, self.above, self.below)

    @property
    def input_limits(self) -> Limits:
        """Limits of new input."""
        if self.input_minimum is None:
            minimum, above = self.minimum, self.above
        else:
            minimum, above = self.input_minimum, None
        maximum = self.maximum if self.input_maximum is None else self.input_maximum
        return Limits(minimum, maximum, above, self.below)


def setting(default: Any, group: str, doc: str, **limits: Any) -> Any:
    """Declare a dataclass field with its metadata."""
    option = Option(group, doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"option": option})
    return field(default=default, metadata={"option": option})


def option_of(item: dataclasses.Field[Any]) -> Option:
    option = item.metadata["option"]
    assert isinstance(option, Option)
    return option


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_input(item: dataclasses.Field[Any], value: Any) -> list[str]:
    """Return problems of a field's value as new input.

    Records of earlier versions may be outside these limits.
    """
    problems = check_alone(item, value, option_of(item).input_limits)
    if problems or value is None:
        return problems
    check = _INPUT_CHECKS.get(item.name)
    return check(value) if check else []


def _check_sample_seconds(seconds: float) -> list[str]:
    if seconds == 0 or seconds >= SHORTEST_SAMPLE_SECONDS:
        return []
    return [
        f"--sample-seconds: must be 0 for none, or at least {SHORTEST_SAMPLE_SECONDS:g},"
        f" got {seconds:g}"
    ]


def _check_share_ranges(shares: tuple[str, ...]) -> list[str]:
    if not any(_is_outside(text, SHARE) for text in shares):
        return []
    return [
        f"--shares: must be auto or a number for each worker, each {SHARE},"
        f" got {shown(','.join(shares))}"
    ]


def _check_slow_ranges(slow: tuple[str, ...]) -> list[str]:
    return [
        f"--slow: must be rank=factor with a factor of {SLOWNESS}, got {shown(text)}"
        for text in slow
        if _is_outside(text.partition("=")[2], SLOWNESS)
    ]


def _check_elastic_range(elastic: str) -> list[str]:
    most = whole_within(elastic.partition(":")[2], Limits(minimum=MOST_MACHINES + 1))
    return [] if most is None else [_elastic_problem(elastic)]


def _check_lr_step_ranges(steps: tuple[str, ...]) -> list[str]:
    return _check_lr_steps(
        steps, Limits(minimum=0, maximum=HIGHEST_RATE), Limits(above=0, maximum=MOST_EPOCHS)
    )


def _check_cluster(text: str) -> list[str]:
    try:
        cluster_spec.parse(text)
    except ValueError as error:
        return [f"--cluster: must be {error}"]
    return []


_INPUT_CHECKS: dict[str, Callable[[Any], list[str]]] = {
    "sample_seconds": _check_sample_seconds,
    "shares": _check_share_ranges,
    "slow": _check_slow_ranges,
    "elastic": _check_elastic_range,
    "lr_steps": _check_lr_step_ranges,
    "cluster": _check_cluster,
}


def check_alone(
    item: dataclasses.Field[Any], value: Any, limits: Limits | None = None
) -> list[str]:
    """Return problems of a field's value by itself; `limits` override the field's."""
    option, flag = option_of(item), flag_of(item.name)
    for part in value if isinstance(value, tuple) else (value,):
        if option.choices and part not in option.choices:
            return [f"{flag}: must be one of {', '.join(option.choices)}, got {shown(part)}"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    limits = limits or option.limits
    return [] if limits.allow(value) else [f"{flag}: must be {limits}, got {shown(value)}"]


def check_together(config: RunConfig) -> list[str]:
    """Return problems of combinations of fields."""
    problems = []
    if config.epochs is not None and config.iterations is not None:
        problems.append("--epochs and --iterations: use only one of them")
    if config.batch_size is not None and config.batch_per_worker is not None:
        problems.append("--batch-size and --batch-per-worker: use only one of them")
    elif config.global_batch_size < config.workers:
        problems.append(
            f"--batch-size: must be at least {config.workers}, one sample for each worker"
        )
    if config.target_accuracy is not None and config.target_loss is not None:
        problems.append("--target-accuracy and --target-loss: use only one of them")
    if config.node_rank >= config.nnodes:
        problems.append(
            f"--node-rank: must be below --nnodes ({config.nnodes}), got {config.node_rank}"
        )
    if config.nesterov and (config.optimizer != "sgd" or config.momentum == 0):
        problems.append("--nesterov: needs --optimizer sgd with a momentum above 0")
    for one, other in (("crop", "shift"), ("flip", "alternate_flip")):
        if {one, other} <= set(config.augment):
            problems.append(f"--augment: use {one} or {other}, not both")
    if (config.schedule == "steps") != bool(config.lr_steps):
        problems.append("--lr-steps and --schedule steps: use both or neither")
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value == "":
            problems.append(f"{flag_of(item.name)}: must not be empty")
        if isinstance(value, str) and "\0" in value:
            problems.append(f"{flag_of(item.name)}: must not contain a null character")
    problems += _check_lr_steps(config.lr_steps, Limits(minimum=0), Limits(above=0))
    problems += _check_workers(config)
    problems += _check_machines(config)
    if config.name and not _is_plain(config.name):
        problems.append(f"--name: must be a plain folder name, got {shown(config.name)}")
    return problems


def _check_workers(config: RunConfig) -> list[str]:
    """Check that shares and slow ranks match the number of workers."""
    problems = []
    if config.shares and config.shares != ("auto",):
        numbers = [_number_within(text, Limits(above=0)) for text in config.shares]
        if len(numbers) != config.workers or None in numbers:
            problems.append(
                f"--shares: must be auto or {config.workers} numbers above 0, one for each worker,"
                f" got {shown(','.join(config.shares))}"
            )
    for text in config.slow:
        rank, _, factor = text.partition("=")
        ranks = Limits(minimum=0, below=config.workers)
        number = _number_within(factor, Limits(minimum=SLOWNESS.minimum))
        if whole_within(rank, ranks) is None or number is None:
            problems.append(
                f"--slow: must be rank=factor with a rank below {config.workers} and a factor"
                f" of {SLOWNESS}, got {shown(text)}"
            )
    return problems


def _check_machines(config: RunConfig) -> list[str]:
    """Check that the number of nodes matches --hosts, --cluster and --elastic."""
    if config.hosts and config.cluster:
        return ["--hosts and --cluster: use only one of them"]
    problems = []
    for flag, count in (("--hosts", len(config.hosts)), ("--cluster", nodes_in(config.cluster))):
        # An elastic run can use fewer of them.
        is_wrong = config.nnodes != count if config.elastic is None else config.nnodes > count
        if count and is_wrong:
            problems.append(f"--nnodes: {flag} has {count} machines, got {config.nnodes}")
    if config.elastic is not None and config.elastic_limits is None:
        problems.append(_elastic_problem(config.elastic))
    return problems


def _elastic_problem(elastic: str) -> str:
    return f"--elastic: must be min:max such as 2:4, at most {MOST_MACHINES}, got {shown(elastic)}"


def nodes_in(cluster: str | None) -> int:
    return cluster_spec.parse_recorded(cluster).nodes if cluster else 0


def _check_lr_steps(steps: tuple[str, ...], rates: Limits, lengths: Limits) -> list[str]:
    for step in steps:
        rate, _, epochs = step.partition(":")
        if _number_within(rate, rates) is None or _number_within(epochs, lengths) is None:
            return [
                "--lr-steps: must be rate:epochs pairs such as 1e-2:10,1e-3:10, with rates of at"
                f" most {HIGHEST_RATE:g} and at most {MOST_EPOCHS:g} epochs, got {shown(step)}"
            ]
    return []


def _is_plain(name: str) -> bool:
    """Whether a text is the name of one visible folder."""
    return bool(name) and name.isprintable() and "/" not in name and not name.startswith(".")


def _number_within(text: str, limits: Limits) -> float | None:
    try:
        number = float(convert(float, text))
    except ValueError:
        return None
    return number if limits.allow(number) else None


def _is_outside(text: str, limits: Limits) -> bool:
    """Whether a text is a number outside the limits."""
    return _number_within(text, Limits()) is not None and _number_within(text, limits) is None


def whole_within(text: str, limits: Limits) -> int | None:
    """Return a number of plain digits; None if it is outside the limits."""
    try:
        number = int(convert(int, text)) if text.isdecimal() else None
    except ValueError:
        return None
    return number if number is not None and limits.allow(number) else None
