"""Calibration: the measurements that predictions are made from, as a JSON file.

A calibration describes one model on one kind of machine. Every time is kept as samples, so that
predictions can resample them for their intervals. Lists may be empty: plan/prediction.py names what
to measure if a prediction needs what is missing.

    calibration = Calibration(model="lenet", gradients=(Gradient(1000, 1.0),), ...)
    calibration.write(Path("calibration.json"))
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from paceline.commbench.fit import Line, Point, fit
from paceline.errors import RecordsError
from paceline.plan.learning import Learning
from paceline.plan.links import Link
from paceline.records import SCHEMA, is_number, read_json, write_json

KIND = "calibration"
VERSION = 1
"""Changes when a reader of an older version would misunderstand the file."""

COMPUTE_PHASES = ("input", "forward", "backward", "update")
OVERLAPPING = ("overlap", "ddp", "fsdp")
"""Strategies whose backward pass includes communication."""
UPDATES_ELSEWHERE = ("sharded", "shared", "parameter_server", "fsdp")
"""Strategies whose workers do not update all weights."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A trainable tensor."""

    size_bytes: int
    ready: float
    """When its gradient is ready, as a fraction of the backward pass."""
    shape: tuple[int, ...] | None = None
    """None if it was not recorded."""


@dataclass(frozen=True, slots=True)
class ComputePoint:
    """Steps of one worker without communication, at one local batch size."""

    samples: int
    """Samples that the worker computes in a step."""
    phases: Mapping[str, float]
    """Mean seconds of a step in each of COMPUTE_PHASES."""
    step_seconds: tuple[float, ...] = ()
    """Compute time of each measured step: the sum of these phases."""

    @property
    def seconds(self) -> float:
        """Mean compute time of a step."""
        return math.fsum(self.phases.values())


@dataclass(frozen=True, slots=True)
class SizePoint:
    """Repeated measurements at one size, as defined for `paceline comm` (docs/metrics.md)."""

    size_bytes: int
    seconds: tuple[float, ...]


def _size_problems(what: str, points: Sequence[SizePoint]) -> Iterator[str]:
    sizes = [point.size_bytes for point in points]
    if min(sizes, default=1) <= 0:
        yield f"{what} must have sizes above 0"
    if len(sizes) > 1 and len({*sizes}) == 1:
        yield f"{what} must have different sizes"


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """A collective by size, all workers starting together, with nothing else running."""

    backend: Literal["gloo", "nccl", "shm", "hierarchical"]
    operation: str
    """As in `paceline comm --operations`."""
    algorithm: str
    """An all-reduce algorithm, or `library`."""
    workers: int
    hosts: int
    """1: all workers are on one host."""
    link: Link | None
    """The nominal link between the hosts; None within a host or if unknown."""
    points: tuple[SizePoint, ...]

    def line(self) -> Line | None:
        """Latency and bandwidth with their errors; None if the times do not rise with the size."""
        return fit([Point(point.size_bytes, point.seconds) for point in self.points])

    def problems(self) -> Iterator[str]:
        """Values that no measurement has."""
        if self.workers < 2 or not 1 <= self.hosts <= self.workers:
            yield "collectives must have two or more workers and at least one host"
        if any(not point.seconds or min(point.seconds) <= 0 for point in self.points):
            yield "collectives must have samples above 0"
        yield from _size_problems("collectives", self.points)
        if self.link is not None:
            yield from self.link.problems()


@dataclass(frozen=True, slots=True)
class CodecTiming:
    """Encoding and decoding by size of the gradient, with the codec's default options."""

    codec: str
    workers: int
    """That the payloads are decoded of."""
    points: tuple[SizePoint, ...]
    has_matrices: bool = True
    """Whether the gradients were matrices; otherwise they were vectors."""

    def problems(self) -> Iterator[str]:
        """Values that no measurement has."""
        if self.workers < 1 or any(
            not point.seconds or min(point.seconds) < 0 for point in self.points
        ):
            yield "codecs must have workers and samples"
        yield from _size_problems("codecs", self.points)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Workers that compute on one host at the same time, and do not communicate."""

    workers: int
    step_seconds: tuple[float, ...]
    """Mean step time of each worker; the local batch is the same for all numbers of workers."""

    def problems(self) -> Iterator[str]:
        """Values that no measurement has."""
        if self.workers < 1 or not self.step_seconds or min(self.step_seconds) <= 0:
            yield "workers side by side must have step times above 0"


def side_by_side_problems(points: Sequence[SideBySide]) -> Iterator[str]:
    for point in points:
        yield from point.problems()
    counts = [point.workers for point in points]
    if counts and (1 not in counts or len({*counts}) < len(counts)):
        yield "one worker, and each other number of workers, must be measured once side by side"


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A training run: the mean over the workers, without the first step."""

    strategy: str
    options: Mapping[str, str]
    backend: str
    workers: int
    hosts: int
    link: Link | None
    samples: int
    """Samples that the worker with the most computes in a step."""
    step_seconds: float
    """As `paceline report` shows it (docs/metrics.md)."""
    phases: Mapping[str, float]
    """Mean seconds of a step in each phase, including `exchange` and `wait`."""
    hidden_exchange_seconds: float = 0.0
    """Overlapped communication of a step."""
    deviation: float = 0.0
    """Relative standard deviation of `step_seconds`: between repeats, or estimated from blocks of
    steps."""
    name: str = ""
    batch_size: int | None = None
    """Of all workers; None: as many samples for each."""

    @property
    def global_samples(self) -> int:
        return self.batch_size or self.samples * self.workers

    def problems(self) -> Iterator[str]:
        """Values that no measurement has."""
        if min(self.workers, self.hosts, self.samples) < 1 or self.step_seconds <= 0:
            yield "runs must have workers, hosts, samples and step times above 0"
        if self.hosts > self.workers:
            yield "runs must have a worker on each host"
        if self.link is not None:
            yield from self.link.problems()

    @property
    def compute_phases(self) -> tuple[str, ...]:
        """Phases in which the strategy neither communicates nor leaves work to others."""
        excluded = {"backward"} if self.strategy in OVERLAPPING else set()
        excluded |= {"update"} if self.strategy in UPDATES_ELSEWHERE else set()
        # FSDP gathers weights in hooks of both passes.
        excluded |= {"forward"} if self.strategy == "fsdp" else set()
        return tuple(phase for phase in COMPUTE_PHASES if phase not in excluded)


@dataclass(frozen=True, slots=True)
class Calibration:
    model: str
    gradients: tuple[Gradient, ...]
    """Every trainable tensor, in the model's order."""
    compute: tuple[ComputePoint, ...]
    residuals: tuple[tuple[float, ...], ...] = ()
    """Of each worker: the compute time of each step, relative to the worker's mean."""
    collectives: tuple[CollectiveTiming, ...] = ()
    codec_timings: tuple[CodecTiming, ...] = ()
    cores_per_worker: float | None = None
    """CPU time that a worker can use, in cores; None if unknown."""
    side_by_side: tuple[SideBySide, ...] = ()
    """With one worker, and with more of them; empty if this was not measured."""
    runs: tuple[MeasuredRun, ...] = ()
    """Runs that correct the model for costs that are specific to a strategy."""
    optimizer_state_bytes: int = 0
    """Momentum and moments of a replica, which `local_sgd` also averages."""
    activation_bytes_per_sample: float | None = None
    """Memory of a worker between forward and backward pass, per sample; None if unknown."""
    learning: Learning | None = None
    """Gradient noise scale, steps and learning rate of a run; None if no run measured them."""
    has_ready_times: bool = True
    """Whether `Gradient.ready` was measured; otherwise it is assumed to be uniform."""
    has_tensor_sizes: bool = True
    """Whether `gradients` are tensors; otherwise they are buckets of a profiled script."""
    script: str | None = None
    """That was measured, instead of `paceline train`."""
    script_words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The program and its arguments, by the samples of a worker in a step."""
    other_processes_share: float | None = None
    """Of the CPU, that processes besides the worst run used; None if it was not sampled."""
    clusters: tuple[str, ...] = ()
    """The emulated nodes of the runs, as in --cluster, without their number."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the runs, where they differ from the defaults: what a command has to repeat."""
    hardware: Mapping[str, Any] = field(default_factory=dict)
    """As in result.json."""
    software: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    """The runs and measurements that this was made from."""

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    @property
    def learning_with_interval(self) -> Learning | None:
        """What batch sizes are chosen by: a few steps at the start of training show too little."""
        learning = self.learning
        return learning if learning is not None and learning.low is not None else None

    def workers_per_host(self, workers: int) -> int | None:
        """Of runs with as many workers, on the most hosts. Without any, of runs on several hosts;
        without runs, of collectives; None if all were on one host."""
        if same := [run.workers // run.hosts for run in self.runs if run.workers == workers]:
            return min(same)
        for measured in (self.runs, self.collectives):
            if counts := [one.workers // one.hosts for one in measured if one.hosts > 1]:
                return max(counts)
            if measured:
                return None
        return None

    @property
    def is_one_host_measured(self) -> bool:
        """Whether several workers communicated that were all on one host."""
        measured: Sequence[MeasuredRun | CollectiveTiming] = (*self.runs, *self.collectives)
        return any(one.workers > one.hosts == 1 for one in measured)

    def links(self) -> list[Link]:
        """The links between hosts that runs or collectives were measured on."""
        found = [run.link for run in self.runs if run.hosts > 1]
        found += [timing.link for timing in self.collectives if timing.hosts > 1]
        return [link for link in dict.fromkeys(found) if link is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a calibration file."""
        return {"schema": SCHEMA, "kind": KIND, "version": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], name: str = "calibration") -> Self:
        """Read `to_dict`; RecordsError if the record is not a valid calibration."""
        if record.get("kind") != KIND:
            raise RecordsError(f"{name} is not a calibration")
        if record.get("version") != VERSION:
            raise RecordsError(
                f"{name} has version {record.get('version')} of calibrations, this paceline reads"
                f" {VERSION}: measure again"
            )
        ignored = {*_HEADER, *_FORMER}
        values = {key: value for key, value in record.items() if key not in ignored}
        if record.get("noise_scale") and record.get("learning_batch_size"):
            values["learning"] = {
                "noise_scale": record["noise_scale"],
                "batch_size": record["learning_batch_size"],
            }
        if isinstance(contention := record.get("contention"), Mapping):
            values["cores_per_worker"] = contention.get("cores_per_worker")
        if cluster := record.get("cluster"):
            values["clusters"] = [cluster]
        try:
            calibration: Self = parse(cls, values)
        except (TypeError, ValueError) as error:
            raise RecordsError(f"{name} is damaged: {error}") from None
        problem = next(calibration._problems(), None)
        if problem:
            raise RecordsError(f"{name} is damaged: {problem}")
        # Earlier versions recorded the communicator that shared weights do not use.
        runs = tuple(
            dataclasses.replace(run, backend="shm" if run.hosts == 1 else "hierarchical")
            if run.strategy == "shared"
            else run
            for run in calibration.runs
        )
        return dataclasses.replace(calibration, runs=runs)

    def write(self, path: Path) -> None:
        try:
            write_json(path, self.to_dict())
        except OSError as error:
            raise RecordsError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.from_dict(read_json(path), str(path))

    def _problems(self) -> Iterator[str]:
        """Values that no measurement has."""
        if not self.gradients or any(each.size_bytes <= 0 for each in self.gradients):
            yield "gradients must have sizes above 0"
        if any(not 0 <= each.ready <= 1 for each in self.gradients):
            yield "gradients must be ready from 0 to 1"
        if any(not _fits(each) for each in self.gradients):
            yield "gradients must have the sizes of their shapes"
        if self.learning and min(self.learning.noise_scale, self.learning.batch_size) <= 0:
            yield "learning must have a noise scale and a batch size above 0"
        for compute in self.compute:
            if compute.samples <= 0 or not compute.seconds > 0:
                yield "compute points must have samples and seconds above 0"
            if set(compute.phases) != set(COMPUTE_PHASES):
                yield f"compute points must have the phases {', '.join(COMPUTE_PHASES)}"
        for timing in self.collectives:
            yield from timing.problems()
        for codec in self.codec_timings:
            yield from codec.problems()
        yield from side_by_side_problems(self.side_by_side)
        for run in self.runs:
            yield from run.problems()


def _fits(gradient: Gradient) -> bool:
    """Whether the tensor consists of elements of one size."""
    elements = 1 if gradient.shape is None else math.prod(gradient.shape)
    return elements > 0 and gradient.size_bytes % elements == 0


_HEADER = ("schema", "kind", "version")
_FORMER = ("codecs", "noise_scale", "learning_batch_size", "contention", "cluster")
"""Fields of earlier calibrations."""


def parse(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type; TypeError or ValueError if it differs."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast("type", kind), value)
    if origin in (typing.Union, types.UnionType):
        (other,) = (each for each in arguments if each is not types.NoneType)
        return None if value is None else parse(other, value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError("a list is missing")
        return tuple(parse(arguments[0], each) for each in value)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is not one of {', '.join(arguments)}")
        return value
    if origin is not None:  # Mapping
        if not isinstance(value, Mapping):
            raise TypeError("an object is missing")
        return {str(key): parse(arguments[1], each) for key, each in value.items()}
    if kind is float:
        if not is_number(value):
            raise TypeError(f"{value!r} is not a finite number")
        return float(value)
    if kind is not Any and type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    if kind is int and not is_number(value):
        raise ValueError("an integer is too large")
    return value


def _parse_dataclass(kind: type, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{kind.__name__} is not an object")
    hints = typing.get_type_hints(kind)
    unknown = next((name for name in value if name not in hints), None)
    if unknown is not None:
        raise ValueError(f"{kind.__name__} has no {unknown}")
    for each in dataclasses.fields(kind):
        is_required = each.default is each.default_factory is dataclasses.MISSING
        if is_required and each.name not in value:
            raise ValueError(f"{each.name} of {kind.__name__} is missing")
    return kind(**{name: parse(hints[name], each) for name, each in value.items()})
