"""`RunConfig`: everything that defines one run, said once.

The command line's flags, the keys of study files and docs/config.md are all derived from the fields
below, with their documentation, choices and limits. Values arrive as text (flags) or as YAML
scalars (study files); `from_mapping` converts both the same way. All problems are reported
together, each with its field and what would do.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline import cluster_spec
from paceline.errors import ConfigError
from paceline.values import convert

Every = int | Literal["epoch", "never"]
"""A cadence: a number of iterations, once an epoch, or never."""

LARGEST_COUNT = 2**63 - 1
"""Of any whole number: what torch can hold."""
DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 64

GROUPS = {
    "task": "What to train",
    "budget": "How long, and in what batches",
    "optimiser": "Optimiser and learning rate",
    "numerics": "Numerics",
    "strategy": "How replicas are kept in step",
    "processes": "Processes",
    "checkpoints": "Checkpoints",
    "records": "Records",
}


@dataclass(frozen=True, slots=True)
class Option:
    """What a field says about itself beyond its type and default."""

    group: str
    doc: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """An exclusive lower limit."""
    below: float | None = None
    """An exclusive upper limit."""
    may_change: bool = False
    """Whether a resumed run may differ from the original here."""
    short: str | None = None
    """A one-letter flag."""


def _option(default: Any, group: str, doc: str, **limits: Any) -> Any:
    option = Option(group, doc, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"option": option})
    return field(default=default, metadata={"option": option})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run; frozen, and valid by the time it exists."""

    model: str = _option("lenet", "task", "a registered model, or your own as package.module:name")
    data: str = _option(
        "digits", "task", "a registered dataset, or your own as package.module:name"
    )
    data_dir: str | None = _option(
        None,
        "task",
        "folder of the datasets' files (default: $PACELINE_DATA, else ~/.cache/paceline)",
        may_change=True,
    )
    train_samples: int | None = _option(
        None, "task", "use only the first so many training samples", minimum=1
    )
    test_samples: int | None = _option(
        None, "task", "use only the first so many test samples", minimum=1
    )
    augment: tuple[str, ...] = _option(
        (),
        "task",
        "random changes to training images, comma-separated",
        choices=("crop", "flip", "cutout"),
    )
    resident_limit_mib: int = _option(
        4096,
        "task",
        "a set larger than this is memory-mapped instead of held in memory",
        minimum=0,
        may_change=True,
    )

    epochs: int | None = _option(
        None,
        "budget",
        f"passes over the training set (default: {DEFAULT_EPOCHS})",
        minimum=1,
        may_change=True,
    )
    iterations: int | None = _option(
        None, "budget", "weight updates, instead of --epochs", minimum=1, may_change=True
    )
    batch_size: int | None = _option(
        None,
        "budget",
        f"samples in one update over all workers (default: {DEFAULT_BATCH_SIZE})",
        minimum=1,
    )
    batch_per_worker: int | None = _option(
        None, "budget", "samples in one update of each worker, instead of --batch-size", minimum=1
    )
    accumulate: int = _option(
        1, "budget", "parts that a worker's batch is computed in, to save memory", minimum=1
    )
    reshuffle: bool = _option(
        True, "budget", "a new order of samples each epoch; without it all repeat the first"
    )
    eval_every: Every = _option(
        "epoch",
        "budget",
        "evaluate on the test set every so many iterations; always at the end",
        minimum=1,
        may_change=True,
    )
    eval_batch_size: int = _option(1000, "budget", "samples in one evaluation batch", minimum=1)
    target_accuracy: float | None = _option(
        None,
        "budget",
        "stop once test accuracy (0 to 1) reaches this",
        above=0,
        maximum=1,
        may_change=True,
    )

    optimizer: str = _option("sgd", "optimiser", "update rule", choices=("sgd", "adam", "adamw"))
    lr: float = _option(
        0.01, "optimiser", "learning rate before schedule, warm-up and scaling", above=0
    )
    momentum: float = _option(0.9, "optimiser", "momentum of sgd", minimum=0, maximum=1)
    nesterov: bool = _option(False, "optimiser", "Nesterov's form of momentum")
    weight_decay: float = _option(0.0, "optimiser", "weight decay; decoupled in adamw", minimum=0)
    beta1: float = _option(
        0.9, "optimiser", "adam's and adamw's first decay rate", minimum=0, below=1
    )
    beta2: float = _option(
        0.999, "optimiser", "adam's and adamw's second decay rate", minimum=0, below=1
    )
    epsilon: float = _option(1e-8, "optimiser", "adam's and adamw's epsilon", above=0)
    schedule: str = _option(
        "constant",
        "optimiser",
        "how the learning rate moves over the run",
        choices=("constant", "steps", "cosine", "one_cycle"),
    )
    lr_steps: tuple[str, ...] = _option(
        (), "optimiser", "for steps: rate:epochs pairs, as in 1e-2:10,1e-3:10,1e-4:20"
    )
    warmup_epochs: float = _option(
        0.0,
        "optimiser",
        "epochs over which the rate rises from zero",
        minimum=0,
        maximum=1e6,
    )
    lr_scaling: str = _option(
        "none",
        "optimiser",
        "multiply the rate by batch / base batch, or by its root",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = _option(
        64, "optimiser", "the batch that --lr is meant for, with --lr-scaling", minimum=1
    )
    clip_norm: float | None = _option(
        None, "optimiser", "largest global norm of the gradient", above=0
    )
    label_smoothing: float = _option(
        0.0, "optimiser", "share of the target spread over all classes", minimum=0, maximum=1
    )

    precision: str = _option(
        "fp32",
        "numerics",
        "arithmetic of forward and backward pass",
        choices=("fp32", "bf16", "fp16"),
    )
    channels_last: bool = _option(
        False, "numerics", "keep images as height, width, channels in memory"
    )
    compile: bool = _option(False, "numerics", "compile the model with torch.compile")
    device: str = _option(
        "auto",
        "numerics",
        "where to train; auto takes a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = _option(
        None,
        "numerics",
        "CPU threads of each worker (default: cores / workers)",
        minimum=1,
        maximum=1024,
    )
    pin: bool = _option(
        False, "numerics", "keep each worker on cores of its own, a part of those of its machine"
    )
    seed: int = _option(
        0,
        "numerics",
        "seed of initial weights, order and augmentation",
        minimum=0,
    )

    strategy: str = _option(
        "single", "strategy", "a registered strategy, or your own as package.module:name"
    )
    options: dict[str, str] = _option(
        {}, "strategy", "a strategy's option, as key=value; repeatable", short="-o"
    )

    communicator: str = _option(
        "torch",
        "strategy",
        "how workers talk: torch.distributed, or shared memory inside a machine and that across",
        choices=("torch", "hierarchical"),
        may_change=True,
    )
    buffers: str = _option(
        "rank0",
        "strategy",
        "whose batch-norm statistics count at evaluation: the first worker's, or the mean of all",
        choices=("rank0", "average"),
    )
    sync_bn: bool = _option(
        False, "strategy", "normalise batches over all workers together instead of each its own"
    )
    shares: tuple[str, ...] = _option(
        (),
        "strategy",
        "how a batch is dealt to the workers, as in 2,1,1; auto follows their measured speed",
    )
    slow: tuple[str, ...] = _option(
        (), "strategy", "slow workers down on purpose, as rank=factor pairs such as 1=2,3=1.5"
    )

    nnodes: int = _option(1, "processes", "machines that take part", minimum=1, may_change=True)
    nproc_per_node: int = _option(
        1, "processes", "workers on each machine", minimum=1, may_change=True
    )
    node_rank: int = _option(
        0, "processes", "which of the machines this is", minimum=0, may_change=True
    )
    master_addr: str = _option(
        "127.0.0.1", "processes", "address of the first machine", may_change=True
    )
    master_port: int = _option(
        29500,
        "processes",
        "free port on the first machine, where there are several",
        minimum=1,
        maximum=65535,
        may_change=True,
    )

    hosts: tuple[str, ...] = _option(
        (),
        "processes",
        "machines to start over ssh, comma-separated, instead of the flags above on each",
        may_change=True,
    )
    cluster: str | None = _option(
        None,
        "processes",
        "emulate these machines, as nodes=4,cpus=0.5,bandwidth=1gbit,latency=200us,slow=3:0.25",
        may_change=True,
    )
    launcher: str = _option(
        "local",
        "processes",
        "who starts the workers: this command, or a Ray cluster",
        choices=("local", "ray"),
        may_change=True,
    )
    elastic: str | None = _option(
        None,
        "processes",
        "fewest:most machines; losing or gaining one costs a restart from the last checkpoint",
        may_change=True,
    )
    max_restarts: int = _option(
        3, "processes", "restarts after failures, with --elastic or Ray", minimum=0, may_change=True
    )
    rendezvous_seconds: float = _option(
        60.0, "processes", "how long workers wait for one another to come", above=0, may_change=True
    )
    timeout_seconds: float = _option(
        300.0,
        "processes",
        "how long a worker waits for an answer before the run fails",
        above=0,
        may_change=True,
    )

    checkpoint_every: Every = _option(
        "never",
        "checkpoints",
        "write a checkpoint every so many iterations",
        minimum=1,
        may_change=True,
    )
    checkpoint_keep: int = _option(
        2, "checkpoints", "how many of the newest to keep", minimum=1, may_change=True
    )
    checkpoint_mode: str = _option(
        "sync",
        "checkpoints",
        "write while training waits, or in the background after a copy",
        choices=("sync", "background"),
        may_change=True,
    )

    out: str = _option("runs", "records", "folder that holds the runs")
    name: str | None = _option(
        None, "records", "name of the run's folder (default: time, model, strategy)"
    )
    sample_seconds: float = _option(
        0.5,
        "records",
        "seconds between samples of CPU, memory and network; 0 takes none",
        minimum=0,
        may_change=True,
    )
    trace: int = _option(
        0,
        "records",
        "write down every phase and transfer of so many iterations, for a timeline",
        minimum=0,
        maximum=1000,
    )
    tensorboard: bool = _option(True, "records", "write scalars for TensorBoard", may_change=True)

    def __post_init__(self) -> None:
        problems = [
            problem for item in fields() for problem in _check_field(item, getattr(self, item.name))
        ]
        if not problems:
            problems = self._check_together()
        if problems:
            raise ConfigError(problems)

    def _check_together(self) -> list[str]:
        """Fields that are fine alone and not beside each other."""
        problems = []
        if self.epochs is not None and self.iterations is not None:
            problems.append("--epochs and --iterations: give one of them, not both")
        if self.batch_size is not None and self.batch_per_worker is not None:
            problems.append("--batch-size and --batch-per-worker: give one of them, not both")
        elif self.global_batch_size < self.workers:
            problems.append(
                f"--batch-size: must be at least {self.workers}, one sample for each worker"
            )
        if self.node_rank >= self.nnodes:
            problems.append(
                f"--node-rank: must be below --nnodes ({self.nnodes}), got {self.node_rank}"
            )
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0):
            problems.append("--nesterov: needs --optimizer sgd with a momentum above 0")
        if (self.schedule == "steps") != bool(self.lr_steps):
            problems.append("--lr-steps and --schedule steps: give both or neither")
        problems += [
            f"{flag_of(item.name)}: must not be empty"
            for item in fields()
            if getattr(self, item.name) == ""
        ]
        problems += _check_lr_steps(self.lr_steps)
        problems += self._check_workers()
        problems += self._check_machines()
        if self.name and not _is_plain(self.name):
            problems.append(f"--name: must be a plain folder name, got {self.name!r}")
        return problems

    def _check_workers(self) -> list[str]:
        """Shares and slowness must be those of the workers that there are."""
        problems = []
        if self.shares and self.shares != ("auto",):
            numbers = [_number_or_none(text) for text in self.shares]
            if len(numbers) != self.workers or not all(number and number > 0 for number in numbers):
                problems.append(
                    f"--shares: must be auto or {self.workers} numbers above 0, one for each"
                    f" worker, got {','.join(self.shares)!r}"
                )
        for text in self.slow:
            rank, _, factor = text.partition("=")
            number = _number_or_none(factor)
            if not rank.isdecimal() or int(rank) >= self.workers or number is None or number < 1:
                problems.append(
                    f"--slow: must be rank=factor with a rank below {self.workers} and a factor"
                    f" of at least 1, got {text!r}"
                )
        return problems

    def _check_machines(self) -> list[str]:
        """Machines that are started by us are counted by us."""
        if self.hosts and self.cluster:
            return ["--hosts and --cluster: give one of them, not both"]
        problems = []
        for flag, count in (("--hosts", len(self.hosts)), ("--cluster", _nodes_in(self.cluster))):
            # Of an elastic run, not all of them need to take part at any time.
            is_wrong = self.nnodes != count if self.elastic is None else self.nnodes > count
            if count and is_wrong:
                problems.append(f"--nnodes: {flag} has {count} machines, got {self.nnodes}")
        if self.elastic is not None and self.elastic_limits is None:
            problems.append(f"--elastic: must be fewest:most such as 2:4, got {self.elastic!r}")
        return problems

    @property
    def elastic_limits(self) -> tuple[int, int] | None:
        """The fewest and the most machines of an elastic run."""
        fewest, _, most = (self.elastic or "").partition(":")
        if not fewest.isdecimal() or not most.isdecimal() or not 1 <= int(fewest) <= int(most):
            return None
        return int(fewest), int(most)

    @property
    def share_weights(self) -> list[float]:
        """Of the workers, to begin with."""
        if not self.shares or self.shares == ("auto",):
            return [1.0] * self.workers
        return [float(text) for text in self.shares]

    def slowness(self, rank: int) -> float:
        pairs = (text.split("=") for text in self.slow)
        return next((float(factor) for who, factor in pairs if int(who) == rank), 1.0)

    @property
    def workers(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples in one update, over all workers."""
        if self.batch_per_worker is not None:
            return self.batch_per_worker * self.workers
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def iterations_in_total(self, batches_per_epoch: int) -> int:
        if self.iterations is not None:
            return self.iterations
        return (DEFAULT_EPOCHS if self.epochs is None else self.epochs) * batches_per_epoch

    def lr_by_epochs(self) -> list[tuple[float, float]]:
        """`lr_steps` as (rate, epochs) pairs."""
        pairs = (step.split(":") for step in self.lr_steps)
        return [(float(rate), float(epochs)) for rate, epochs in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and YAML can hold and `from_mapping` takes back."""
        values = dataclasses.asdict(self)
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }


def fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(RunConfig)


def option_of(item: dataclasses.Field[Any]) -> Option:
    option = item.metadata["option"]
    assert isinstance(option, Option)
    return option


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


_TYPES = typing.get_type_hints(RunConfig)


def type_of(item: dataclasses.Field[Any]) -> Any:
    return _TYPES[item.name]


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """A config from text or YAML values by field name; every problem is reported at once."""
    known = {item.name: item for item in fields()}
    problems = [f"{name}: no such setting" for name in values if name not in known]
    converted = {}
    for name, raw in values.items():
        if name in known:
            try:
                converted[name] = convert(type_of(known[name]), raw)
            except ValueError as error:
                problems.append(f"{flag_of(name)}: must be {error}, got {raw!r}")
            else:
                # An empty list is how files say none; a flag that is given is meant to say some.
                if converted[name] == () and isinstance(raw, str):
                    problems.append(f"{flag_of(name)}: must not be empty, got {raw!r}")
    for name, value in converted.items():
        problems += _check_field(known[name], value)
    if converted.get("cluster"):
        try:
            cluster_spec.parse(converted["cluster"])
        except ValueError as error:
            problems.append(f"--cluster: must be {error}")
    if problems:
        raise ConfigError(problems)
    if "nnodes" not in values:
        # Machines that are named or described need not be counted as well.
        machines = len(converted.get("hosts", ())) or _nodes_in(converted.get("cluster"))
        converted |= {"nnodes": machines} if machines else {}
    return RunConfig(**converted)


def _nodes_in(cluster: str | None) -> int:
    return cluster_spec.parse(cluster).nodes if cluster else 0


def _check_field(item: dataclasses.Field[Any], value: Any) -> list[str]:
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
