"""`RunConfig`: everything that defines one run, said once."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any, Literal

from paceline.config.conversion import LARGEST_INTEGER, Limits
from paceline.config.schema import (
    HIGHEST_RATE,
    MOST_EPOCHS,
    MOST_MACHINES,
    check_alone,
    check_together,
    setting,
    whole_within,
)
from paceline.errors import ConfigError

Every = int | Literal["epoch", "never"]
"""A cadence: a number of iterations, once an epoch, or never."""

MOST_SAMPLES = 10**12
MOST_ITERATIONS = 10**12
LARGEST_BATCH = 10**9
LONGEST_WAIT_SECONDS = 7 * 86_400.0
"""A week."""

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One run; frozen, and valid by the time it exists."""

    model: str = setting("lenet", "task", "a registered model, or your own as package.module:name")
    data: str = setting(
        "digits", "task", "a registered dataset, or your own as package.module:name"
    )
    data_dir: str | None = setting(
        None,
        "task",
        "folder of the datasets' files (default: $PACELINE_DATA, else ~/.cache/paceline)",
        mutable_on_resume=True,
    )
    train_samples: int | None = setting(
        None,
        "task",
        "use only the first so many training samples",
        minimum=1,
        input_maximum=MOST_SAMPLES,
    )
    test_samples: int | None = setting(
        None,
        "task",
        "use only the first so many test samples",
        minimum=1,
        input_maximum=MOST_SAMPLES,
    )
    augment: tuple[str, ...] = setting(
        (),
        "task",
        "random changes to training images, comma-separated",
        choices=("crop", "flip", "cutout"),
    )
    resident_limit_mib: int = setting(
        4096,
        "task",
        "a set larger than this is memory-mapped instead of held in memory",
        minimum=0,
        input_maximum=2**30,
        mutable_on_resume=True,
    )

    epochs: int | None = setting(
        None,
        "budget",
        f"passes over the training set (default: {DEFAULT_EPOCHS})",
        minimum=1,
        input_maximum=MOST_EPOCHS,
        mutable_on_resume=True,
    )
    iterations: int | None = setting(
        None,
        "budget",
        "weight updates, instead of --epochs",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    batch_size: int | None = setting(
        None,
        "budget",
        f"samples in one update over all workers (default: {DEFAULT_BATCH_SIZE})",
        minimum=1,
        input_maximum=LARGEST_BATCH,
    )
    batch_per_worker: int | None = setting(
        None,
        "budget",
        "samples in one update of each worker, instead of --batch-size",
        minimum=1,
        input_maximum=LARGEST_BATCH,
        is_in_checkpoints=False,
    )
    accumulate: int = setting(
        1,
        "budget",
        "parts that a worker's batch is computed in, to save memory",
        minimum=1,
        input_maximum=10**6,
    )
    reshuffle: bool = setting(
        True, "budget", "a new order of samples each epoch; without it all repeat the first"
    )
    eval_every: Every = setting(
        "epoch",
        "budget",
        "evaluate on the test set every so many iterations; always at the end",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    eval_batch_size: int = setting(
        1000, "budget", "samples in one evaluation batch", minimum=1, input_maximum=LARGEST_BATCH
    )
    target_accuracy: float | None = setting(
        None,
        "budget",
        "stop once test accuracy (0 to 1) reaches this",
        above=0,
        maximum=1,
        mutable_on_resume=True,
    )

    optimizer: str = setting("sgd", "optimiser", "update rule", choices=("sgd", "adam", "adamw"))
    lr: float = setting(
        0.01,
        "optimiser",
        "learning rate before schedule, warm-up and scaling",
        above=0,
        input_maximum=HIGHEST_RATE,
    )
    momentum: float = setting(0.9, "optimiser", "momentum of sgd", minimum=0, maximum=1)
    nesterov: bool = setting(False, "optimiser", "Nesterov's form of momentum")
    weight_decay: float = setting(
        0.0, "optimiser", "weight decay; decoupled in adamw", minimum=0, input_maximum=1e6
    )
    beta1: float = setting(
        0.9, "optimiser", "adam's and adamw's first decay rate", minimum=0, below=1
    )
    beta2: float = setting(
        0.999, "optimiser", "adam's and adamw's second decay rate", minimum=0, below=1
    )
    epsilon: float = setting(
        1e-8, "optimiser", "adam's and adamw's epsilon", above=0, input_maximum=1e6
    )
    schedule: str = setting(
        "constant",
        "optimiser",
        "how the learning rate moves over the run",
        choices=("constant", "steps", "cosine", "one_cycle"),
    )
    lr_steps: tuple[str, ...] = setting(
        (), "optimiser", "for steps: rate:epochs pairs, as in 1e-2:10,1e-3:10,1e-4:20"
    )
    warmup_epochs: float = setting(
        0.0,
        "optimiser",
        "epochs over which the rate rises from zero",
        minimum=0,
        maximum=MOST_EPOCHS,
    )
    lr_scaling: str = setting(
        "none",
        "optimiser",
        "multiply the rate by batch / base batch, or by its root",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = setting(
        64,
        "optimiser",
        "the batch that --lr is meant for, with --lr-scaling",
        minimum=1,
        input_maximum=LARGEST_BATCH,
    )
    clip_norm: float | None = setting(
        None, "optimiser", "largest global norm of the gradient", above=0, input_maximum=1e9
    )
    label_smoothing: float = setting(
        0.0, "optimiser", "share of the target spread over all classes", minimum=0, maximum=1
    )

    precision: str = setting(
        "fp32",
        "numerics",
        "arithmetic of forward and backward pass",
        choices=("fp32", "bf16", "fp16"),
    )
    channels_last: bool = setting(
        False, "numerics", "keep images as height, width, channels in memory"
    )
    compile: bool = setting(False, "numerics", "compile the model with torch.compile")
    device: str = setting(
        "auto",
        "numerics",
        "where to train; auto takes a GPU if there is one",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = setting(
        None,
        "numerics",
        "CPU threads of each worker (default: cores / workers)",
        minimum=1,
        maximum=1024,
    )
    pin: bool = setting(
        False, "numerics", "keep each worker on cores of its own, a part of those of its machine"
    )
    seed: int = setting(
        0,
        "numerics",
        "seed of initial weights, order and augmentation",
        minimum=0,
        maximum=LARGEST_INTEGER,
    )

    strategy: str = setting(
        "single", "strategy", "a registered strategy, or your own as package.module:name"
    )
    options: dict[str, str] = setting(
        {}, "strategy", "a strategy's option, as key=value; repeatable", short="-o"
    )

    communicator: str = setting(
        "torch",
        "strategy",
        "how workers talk: torch.distributed, or shared memory inside a machine and that across",
        choices=("torch", "hierarchical"),
        mutable_on_resume=True,
    )
    buffers: str = setting(
        "rank0",
        "strategy",
        "whose batch-norm statistics count at evaluation: the first worker's, or the mean of all",
        choices=("rank0", "average"),
    )
    sync_bn: bool = setting(
        False, "strategy", "normalise batches over all workers together instead of each its own"
    )
    shares: tuple[str, ...] = setting(
        (),
        "strategy",
        "how a batch is dealt to the workers, as in 2,1,1; auto follows their measured speed",
    )
    slow: tuple[str, ...] = setting(
        (), "strategy", "slow workers down on purpose, as rank=factor pairs such as 1=2,3=1.5"
    )

    nnodes: int = setting(
        1,
        "processes",
        "machines that take part",
        minimum=1,
        input_maximum=MOST_MACHINES,
        mutable_on_resume=True,
    )
    nproc_per_node: int = setting(
        1,
        "processes",
        "workers on each machine",
        minimum=1,
        input_maximum=1024,
        mutable_on_resume=True,
    )
    node_rank: int = setting(
        0,
        "processes",
        "which of the machines this is",
        minimum=0,
        input_maximum=MOST_MACHINES - 1,
        mutable_on_resume=True,
    )
    master_addr: str = setting(
        "127.0.0.1", "processes", "address of the first machine", mutable_on_resume=True
    )
    master_port: int = setting(
        29500,
        "processes",
        "free port on the first machine, where there are several",
        minimum=1,
        maximum=65535,
        mutable_on_resume=True,
    )

    hosts: tuple[str, ...] = setting(
        (),
        "processes",
        "machines to start over ssh, comma-separated, instead of the flags above on each",
        mutable_on_resume=True,
    )
    cluster: str | None = setting(
        None,
        "processes",
        "emulate these machines, as nodes=4,cpus=0.5,bandwidth=1gbit,latency=200us,slow=3:0.25",
        mutable_on_resume=True,
    )
    launcher: str = setting(
        "local",
        "processes",
        "who starts the workers: this command, or a Ray cluster",
        choices=("local", "ray"),
        mutable_on_resume=True,
    )
    elastic: str | None = setting(
        None,
        "processes",
        "fewest:most machines; losing or gaining one costs a restart from the last checkpoint",
        mutable_on_resume=True,
    )
    max_restarts: int = setting(
        3,
        "processes",
        "restarts after failures, with --elastic or Ray",
        minimum=0,
        input_maximum=10**4,
        mutable_on_resume=True,
    )
    rendezvous_seconds: float = setting(
        60.0,
        "processes",
        "how long workers wait for one another to come",
        above=0,
        input_minimum=0.1,
        input_maximum=LONGEST_WAIT_SECONDS,
        mutable_on_resume=True,
    )
    timeout_seconds: float = setting(
        300.0,
        "processes",
        "how long a worker waits for an answer before the run fails",
        above=0,
        input_minimum=0.1,
        input_maximum=LONGEST_WAIT_SECONDS,
        mutable_on_resume=True,
    )

    checkpoint_every: Every = setting(
        "never",
        "checkpoints",
        "write a checkpoint every so many iterations",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    checkpoint_keep: int = setting(
        2,
        "checkpoints",
        "how many of the newest to keep",
        minimum=1,
        input_maximum=10**6,
        mutable_on_resume=True,
    )
    checkpoint_mode: str = setting(
        "sync",
        "checkpoints",
        "write while training waits, or in the background after a copy",
        choices=("sync", "background"),
        mutable_on_resume=True,
    )

    out: str = setting("runs", "records", "folder that holds the runs", is_in_checkpoints=False)
    name: str | None = setting(
        None,
        "records",
        "name of the run's folder (default: time, model, strategy)",
        is_in_checkpoints=False,
    )
    sample_seconds: float = setting(
        0.5,
        "records",
        "seconds between samples of CPU, memory and network; 0 takes none",
        minimum=0,
        input_maximum=86_400.0,
        mutable_on_resume=True,
    )
    trace: int = setting(
        0,
        "records",
        "write down every phase and transfer of so many iterations, for a timeline",
        minimum=0,
        maximum=1000,
    )
    tensorboard: bool = setting(
        True, "records", "write scalars for TensorBoard", mutable_on_resume=True
    )

    def __post_init__(self) -> None:
        problems = [
            problem for item in fields() for problem in check_alone(item, getattr(self, item.name))
        ] or check_together(self)
        if problems:
            raise ConfigError(problems)

    @property
    def elastic_limits(self) -> tuple[int, int] | None:
        """The fewest and the most machines of an elastic run."""
        fewest, _, most = (self.elastic or "").partition(":")
        machines = Limits(minimum=1)
        low, high = whole_within(fewest, machines), whole_within(most, machines)
        return None if low is None or high is None or low > high else (low, high)

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


_TYPES = typing.get_type_hints(RunConfig)


def type_of(item: dataclasses.Field[Any]) -> Any:
    return _TYPES[item.name]
