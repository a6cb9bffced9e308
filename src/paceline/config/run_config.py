"""`RunConfig`: all settings of a run, with their documentation, choices and limits."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paceline.config.conversion import LARGEST_INTEGER, Limits, Switch
from paceline.config.schema import (
    HIGHEST_RATE,
    MOST_EPOCHS,
    MOST_MACHINES,
    SHORTEST_SAMPLE_SECONDS,
    check_alone,
    check_together,
    setting,
    whole_within,
)
from paceline.errors import ConfigError

Every = int | Literal["epoch", "never"]
"""An interval: a number of steps, every epoch, or never."""

NoiseEvery = int | Literal["auto", "never"]
"""Steps between measurements of the gradient noise scale."""

MOST_SAMPLES = 10**12
MOST_ITERATIONS = 10**12
LARGEST_BATCH = 10**9
LONGEST_WAIT_SECONDS = 7 * 86_400.0
"""A week."""

DEFAULT_EPOCHS = 10
DEFAULT_BATCH_SIZE = 64
DEFAULT_CONTEXT = 128
DEFAULT_TEXT_TEST_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """An accuracy or loss of the test set at which a run stops."""

    figure: Literal["accuracy", "loss"]
    value: float

    @property
    def key(self) -> str:
        """Of an evaluation in the records."""
        return f"test_{self.figure}"

    def is_reached(self, value: float) -> bool:
        return value >= self.value if self.figure == "accuracy" else value <= self.value

    def __str__(self) -> str:
        return f"{self.figure} {self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The settings of a run; immutable and validated on construction."""

    model: str = setting("lenet", "task", "registered model, or your own as package.module:name")
    model_options: dict[str, str] = setting(
        {}, "task", "model option as key=value, such as width=0.5; repeatable"
    )
    data: str = setting(
        "digits", "task", "registered dataset, text:PATH, or your own as package.module:name"
    )
    data_dir: str | None = setting(
        None,
        "task",
        "dataset directory (default: $PACELINE_DATA, else ~/.cache/paceline)",
        mutable_on_resume=True,
    )
    train_samples: int | None = setting(
        None,
        "task",
        "use only the first N training samples",
        minimum=1,
        input_maximum=MOST_SAMPLES,
    )
    test_samples: int | None = setting(
        None,
        "task",
        "use only the first N test samples",
        minimum=1,
        input_maximum=MOST_SAMPLES,
    )
    context: int | None = setting(
        None,
        "task",
        f"bytes per sample of text and stories (default: {DEFAULT_CONTEXT})",
        minimum=1,
        input_maximum=10**9,
    )
    text_test_fraction: float | None = setting(
        None,
        "task",
        "fraction of text:PATH, taken from its end, that is the test set"
        f" (default: {DEFAULT_TEXT_TEST_FRACTION:g})",
        above=0,
        below=1,
    )
    normalize: str = setting(
        "dataset",
        "task",
        "normalize images by the mean and standard deviation of the dataset, or of each image",
        choices=("dataset", "image"),
    )
    augment: tuple[str, ...] = setting(
        (),
        "task",
        "random augmentations of training images, comma-separated; alternate_flip flips each image"
        " in every other epoch",
        choices=("crop", "flip", "alternate_flip", "cutout", "shift"),
    )
    resident_limit_mib: int = setting(
        4096,
        "task",
        "memory-map datasets larger than this many MiB instead of loading them",
        minimum=0,
        input_maximum=2**30,
        mutable_on_resume=True,
    )

    epochs: int | None = setting(
        None,
        "budget",
        f"number of epochs (default: {DEFAULT_EPOCHS})",
        minimum=1,
        input_maximum=MOST_EPOCHS,
        mutable_on_resume=True,
    )
    iterations: int | None = setting(
        None,
        "budget",
        "number of training steps, instead of --epochs",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    batch_size: int | None = setting(
        None,
        "budget",
        f"global batch size over all workers (default: {DEFAULT_BATCH_SIZE})",
        minimum=1,
        input_maximum=LARGEST_BATCH,
    )
    batch_per_worker: int | None = setting(
        None,
        "budget",
        "batch size of each worker, instead of --batch-size",
        minimum=1,
        input_maximum=LARGEST_BATCH,
        is_in_checkpoints=False,
    )
    accumulate: int = setting(
        1,
        "budget",
        "gradient accumulation steps: microbatches per worker batch, to save memory",
        minimum=1,
        input_maximum=10**6,
    )
    reshuffle: bool = setting(
        True,
        "budget",
        "reshuffle the training set every epoch; otherwise reuse the first epoch's order",
    )
    eval_every: Every = setting(
        "epoch",
        "budget",
        "evaluate on the test set every N steps; always at the end",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    metrics: tuple[str, ...] = setting(
        (),
        "budget",
        "metrics of the test set besides those of the data, comma-separated: accuracy, perplexity,"
        " bits_per_byte, or your own as package.module:name",
        mutable_on_resume=True,
    )
    eval_batch_size: int = setting(
        1000, "budget", "evaluation batch size", minimum=1, input_maximum=LARGEST_BATCH
    )
    eval_views: int = setting(
        1,
        "budget",
        "average the predictions over N views of each test image: the image, its mirror image,"
        " and both shifted by one pixel in either direction",
        minimum=1,
        maximum=6,
    )
    target_accuracy: float | None = setting(
        None,
        "budget",
        "stop when test accuracy (0 to 1) reaches this value",
        above=0,
        maximum=1,
        mutable_on_resume=True,
    )
    target_loss: float | None = setting(
        None,
        "budget",
        "stop when test loss is at most this value",
        above=0,
        input_maximum=1e9,
        mutable_on_resume=True,
    )

    optimizer: str = setting(
        "sgd",
        "optimizer",
        "optimizer; muon updates weight matrices by Muon and vectors by AdamW",
        choices=("sgd", "adam", "adamw", "muon"),
    )
    lr: float = setting(
        0.01,
        "optimizer",
        "learning rate before schedule, warmup and scaling",
        above=0,
        input_maximum=HIGHEST_RATE,
    )
    momentum: float = setting(0.9, "optimizer", "momentum of SGD and Muon", minimum=0, maximum=1)
    nesterov: bool = setting(False, "optimizer", "use Nesterov momentum")
    weight_decay: float = setting(
        0.0, "optimizer", "weight decay; decoupled for adamw and muon", minimum=0, input_maximum=1e6
    )
    beta1: float = setting(
        0.9, "optimizer", "Adam beta1: decay rate of the first moment", minimum=0, below=1
    )
    beta2: float = setting(
        0.999, "optimizer", "Adam beta2: decay rate of the second moment", minimum=0, below=1
    )
    epsilon: float = setting(1e-8, "optimizer", "Adam epsilon", above=0, input_maximum=1e6)
    schedule: str = setting(
        "constant",
        "optimizer",
        "learning rate schedule",
        choices=("constant", "steps", "linear", "cosine", "one_cycle"),
    )
    lr_steps: tuple[str, ...] = setting(
        (), "optimizer", "rate:epochs pairs for --schedule steps, as in 1e-2:10,1e-3:10,1e-4:20"
    )
    warmup_epochs: float = setting(
        0.0,
        "optimizer",
        "epochs of linear learning rate warmup from zero",
        minimum=0,
        maximum=MOST_EPOCHS,
    )
    lr_scaling: str = setting(
        "none",
        "optimizer",
        "scale the learning rate with global batch size / base batch size, or its square root",
        choices=("none", "linear", "sqrt"),
    )
    base_batch_size: int = setting(
        64,
        "optimizer",
        "batch size that --lr is tuned for, with --lr-scaling",
        minimum=1,
        input_maximum=LARGEST_BATCH,
    )
    clip_norm: float | None = setting(
        None, "optimizer", "maximum global gradient norm", above=0, input_maximum=1e9
    )
    label_smoothing: float = setting(
        0.0, "optimizer", "label smoothing factor", minimum=0, maximum=1
    )

    precision: str = setting(
        "auto",
        "numerics",
        "precision of the forward and backward passes; auto is fp32 on a CPU, and on a GPU bf16"
        " where a measurement at the start shows that it is faster",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    channels_last: Switch = setting(
        "auto",
        "numerics",
        "channels-last memory format; auto is off on a CPU, and on a GPU measured for models with"
        " convolutions",
        choices=get_args(Switch),
    )
    compile: bool = setting(False, "numerics", "compile the model with torch.compile")
    cuda_graph: Switch = setting(
        "auto",
        "numerics",
        "run the training step as one CUDA graph; auto does so on a GPU where it is possible",
        choices=get_args(Switch),
        mutable_on_resume=True,
    )
    device: str = setting(
        "auto",
        "numerics",
        "device to train on; auto uses a GPU if available",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int | None = setting(
        None,
        "numerics",
        "CPU threads per worker (default: cores / workers)",
        minimum=1,
        maximum=1024,
    )
    pin: bool = setting(False, "numerics", "pin each worker to its own CPU cores")
    seed: int = setting(
        0,
        "numerics",
        "random seed for initial weights, sample order and augmentation",
        minimum=0,
        maximum=LARGEST_INTEGER,
    )

    strategy: str = setting(
        "single", "strategy", "registered strategy, or your own as package.module:name"
    )
    options: dict[str, str] = setting(
        {}, "strategy", "strategy option as key=value; repeatable", short="-o"
    )

    communicator: str = setting(
        "torch",
        "strategy",
        "torch.distributed, or hierarchical: shared memory within a node, torch.distributed across",
        choices=("torch", "hierarchical"),
        mutable_on_resume=True,
    )
    buffers: str = setting(
        "rank0",
        "strategy",
        "batch-norm statistics used for evaluation: rank 0's, or the mean over all ranks",
        choices=("rank0", "average"),
    )
    sync_bn: bool = setting(False, "strategy", "synchronize batch normalization across workers")
    shares: tuple[str, ...] = setting(
        (),
        "strategy",
        "relative batch share of each worker, as in 2,1,1; auto follows measured throughput",
    )
    slow: tuple[str, ...] = setting(
        (), "strategy", "slow down workers artificially, as rank=factor pairs such as 1=2,3=1.5"
    )

    nnodes: int = setting(
        1,
        "processes",
        "number of nodes",
        minimum=1,
        input_maximum=MOST_MACHINES,
        mutable_on_resume=True,
    )
    nproc_per_node: int = setting(
        1,
        "processes",
        "workers per node",
        minimum=1,
        input_maximum=1024,
        mutable_on_resume=True,
    )
    node_rank: int = setting(
        0,
        "processes",
        "rank of this node",
        minimum=0,
        input_maximum=MOST_MACHINES - 1,
        mutable_on_resume=True,
    )
    master_addr: str = setting(
        "127.0.0.1", "processes", "address of the first node", mutable_on_resume=True
    )
    master_port: int = setting(
        29500,
        "processes",
        "free port on the first node, for multi-node runs",
        minimum=1,
        maximum=65535,
        mutable_on_resume=True,
    )

    hosts: tuple[str, ...] = setting(
        (),
        "processes",
        "hosts to start over SSH, comma-separated, instead of the flags above on each node",
        mutable_on_resume=True,
    )
    cluster: str | None = setting(
        None,
        "processes",
        "emulated cluster, as nodes=4,cpus=0.5,bandwidth=1gbit,latency=200us,slow=3:0.25",
        mutable_on_resume=True,
    )
    launcher: str = setting(
        "local",
        "processes",
        "start workers from this command, or on a Ray cluster",
        choices=("local", "ray"),
        mutable_on_resume=True,
    )
    elastic: str | None = setting(
        None,
        "processes",
        "min:max nodes; a node that joins or leaves causes a restart from the last checkpoint",
        mutable_on_resume=True,
    )
    max_restarts: int = setting(
        3,
        "processes",
        "maximum restarts after failures, with --elastic or Ray",
        minimum=0,
        input_maximum=10**4,
        mutable_on_resume=True,
    )
    rendezvous_seconds: float = setting(
        60.0,
        "processes",
        "rendezvous timeout: how long workers wait for each other at startup",
        above=0,
        input_minimum=0.1,
        input_maximum=LONGEST_WAIT_SECONDS,
        mutable_on_resume=True,
    )
    timeout_seconds: float = setting(
        300.0,
        "processes",
        "communication timeout: how long a worker waits for a peer before the run fails",
        above=0,
        input_minimum=0.1,
        input_maximum=LONGEST_WAIT_SECONDS,
        mutable_on_resume=True,
    )

    checkpoint_every: Every = setting(
        "never",
        "checkpoints",
        "write a checkpoint every N steps",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    checkpoint_keep: int = setting(
        2,
        "checkpoints",
        "number of most recent checkpoints to keep",
        minimum=1,
        input_maximum=10**6,
        mutable_on_resume=True,
    )
    checkpoint_mode: str = setting(
        "sync",
        "checkpoints",
        "sync blocks training during the write; background copies the state and writes"
        " it in parallel",
        choices=("sync", "background"),
        mutable_on_resume=True,
    )

    out: str = setting("runs", "records", "directory for run folders", is_in_checkpoints=False)
    name: str | None = setting(
        None,
        "records",
        "name of the run folder (default: time-model-strategy)",
        is_in_checkpoints=False,
    )
    sample_seconds: float = setting(
        0.5,
        "records",
        f"interval of CPU, memory and network sampling; 0 disables it, otherwise at least"
        f" {SHORTEST_SAMPLE_SECONDS:g}",
        minimum=0,
        input_maximum=86_400.0,
        mutable_on_resume=True,
    )
    trace: int = setting(
        0,
        "records",
        "record a timeline of all phases and transfers for N steps",
        minimum=0,
        maximum=1000,
    )
    noise_every: NoiseEvery = setting(
        "auto",
        "records",
        "measure the gradient noise scale in every Nth step; auto is 50, except in a CUDA graph",
        minimum=1,
        input_maximum=MOST_ITERATIONS,
        mutable_on_resume=True,
    )
    tensorboard: bool = setting(
        True, "records", "write TensorBoard scalars", mutable_on_resume=True
    )

    def __post_init__(self) -> None:
        problems = [
            problem for item in fields() for problem in check_alone(item, getattr(self, item.name))
        ] or check_together(self)
        if problems:
            raise ConfigError(problems)

    @property
    def elastic_limits(self) -> tuple[int, int] | None:
        """Minimum and maximum number of nodes of an elastic run."""
        fewest, _, most = (self.elastic or "").partition(":")
        machines = Limits(minimum=1)
        low, high = whole_within(fewest, machines), whole_within(most, machines)
        return None if low is None or high is None or low > high else (low, high)

    @property
    def share_weights(self) -> list[float]:
        """Initial batch share of each worker."""
        if not self.shares or self.shares == ("auto",):
            return [1.0] * self.workers
        return [float(text) for text in self.shares]

    def slowness(self, rank: int) -> float:
        pairs = (text.split("=") for text in self.slow)
        return next((float(factor) for slow_rank, factor in pairs if int(slow_rank) == rank), 1.0)

    @property
    def is_channels_last(self) -> bool:
        """Whether a worker uses the channels-last memory format; `auto` must be resolved before."""
        assert self.channels_last != "auto", "training/gpu/precision.py resolves it"
        return self.channels_last == "on"

    @property
    def target(self) -> Target | None:
        """What ends the run early."""
        if self.target_accuracy is not None:
            return Target("accuracy", self.target_accuracy)
        return None if self.target_loss is None else Target("loss", self.target_loss)

    @property
    def model_text(self) -> str:
        """The model with its options, such as `vgg11 width=0.25`."""
        return " ".join(
            [self.model, *(f"{key}={text}" for key, text in self.model_options.items())]
        )

    @property
    def workers(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def global_batch_size(self) -> int:
        """Samples per update over all workers."""
        if self.batch_per_worker is not None:
            return self.batch_per_worker * self.workers
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    @property
    def learning_rate_scale(self) -> float:
        """Factor on all learning rates, by `lr_scaling`."""
        ratio = self.global_batch_size / self.base_batch_size
        return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]

    def iterations_in_total(self, batches_per_epoch: int) -> int:
        if self.iterations is not None:
            return self.iterations
        return (DEFAULT_EPOCHS if self.epochs is None else self.epochs) * batches_per_epoch

    def lr_by_epochs(self) -> list[tuple[float, float]]:
        """`lr_steps` as (rate, epochs) pairs."""
        pairs = (step.split(":") for step in self.lr_steps)
        return [(float(rate), float(epochs)) for rate, epochs in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and YAML, which `from_mapping` accepts."""
        values = dataclasses.asdict(self)
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in values.items()
        }


def key(config: RunConfig, ignoring: Container[str] = ()) -> str:
    """Return text that is equal for configs whose fields agree, except those of `ignoring`."""
    values = {name: value for name, value in config.to_dict().items() if name not in ignoring}
    return json.dumps(values, sort_keys=True)


def fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(RunConfig)


_TYPES = typing.get_type_hints(RunConfig)


def type_of(item: dataclasses.Field[Any]) -> Any:
    return _TYPES[item.name]
