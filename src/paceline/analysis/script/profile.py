"""What a profile recorded about a script besides its steps: its calls, DataLoaders and threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from paceline.analysis.events import WorkerEvents, read_iterations
from paceline.analysis.run import Run
from paceline.analysis.script.rank_windows import RankWindows, rank_windows
from paceline.analysis.validation import is_number
from paceline.records import read_lines


@dataclass(frozen=True, slots=True)
class LibraryLine:
    """A line of an installed library."""

    file: str
    """Relative to site-packages."""
    number: int

    @property
    def library(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the script."""

    file: str
    number: int
    code: str = ""
    made_in: LibraryLine | None = None
    """The line that makes the call, if it is not the script's own."""

    @property
    def text(self) -> str:
        text = f"{PurePath(self.file).name}:{self.number}"
        if self.made_in is None:
            return text
        return f"in {self.made_in.file}:{self.made_in.number}, called from {text}"


@dataclass(frozen=True, slots=True)
class Call:
    """Calls of one function from one line, by one rank."""

    name: str
    line: Line
    count: int
    steps: int
    """Steps with a call."""
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Copies(Call):
    """Copies from the host to a GPU by one line; the seconds are those of the program."""

    pageable_bytes: int
    blocking_bytes: int

    @property
    def is_pageable(self) -> bool:
        return 2 * self.pageable_bytes > self.bytes

    @property
    def blocks(self) -> bool:
        """Whether the program waits until the GPU has done them, and all work before them."""
        return self.is_pageable or 2 * self.blocking_bytes > self.bytes


@dataclass(frozen=True, slots=True)
class Loader:
    line: Line | None
    workers: int
    batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DdpModel:
    line: Line | None
    bucket_bytes: tuple[int, ...]
    find_unused_parameters: bool
    unused_bytes: int
    """In sampled steps."""
    same_parameters_unused: bool
    """In all steps; false if unknown."""
    searches: int
    search_seconds: float

    @property
    def is_always_used(self) -> bool:
        """Whether every step uses all parameters, as far as this rank searched for unused ones."""
        return self.same_parameters_unused and not self.unused_bytes


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Totals of the process of a rank at a moment."""

    time: float
    steps: int
    cpu_seconds: float
    queue_seconds: float | None
    """All threads together were ready to run, but had no core."""
    main_queue_seconds: float | None
    rss_bytes: float | None
    gpu_bytes: float | None


@dataclass(frozen=True)
class RankFacts:
    rank: int
    host: str
    events: WorkerEvents
    threads: int | None = None
    omp_num_threads: str | None = None
    cores: int | None = None
    """How many the rank may use."""
    core_set: int | None = None
    """Which ones, as bits; None if unknown."""
    calls: Sequence[Call] = ()
    loaders: Sequence[Loader] = ()
    ddp_models: Sequence[DdpModel] = ()
    copies: Sequence[Copies] = ()
    samples: Sequence[ProcessSample] = field(default_factory=list)
    """From the first block of steps on."""
    counted_steps: int = 0
    """Steps that calls, DataLoaders and DDP models are counted in."""

    @property
    def steps(self) -> int:
        return self.events.end

    @property
    def step_seconds(self) -> float:
        """The mean without the first step."""
        return float(self.events.seconds[1:].mean()) if self.steps > 1 else 0.0

    @property
    def training_seconds(self) -> float:
        return self.step_seconds * self.steps

    def share(self, seconds: float) -> float:
        """What the total of a call or a model is of the step time."""
        spent = self.step_seconds * self.counted_steps
        return min(1.0, seconds / spent) if spent else 0.0

    def between(self, name: str) -> float | None:
        """The increase of a total from the first to the last sample."""
        values = [getattr(one, name) for one in self.samples]
        return values[-1] - values[0] if len(values) > 1 and None not in values else None

    @property
    def core_wait(self) -> float | None:
        """The share of the time in which the training thread was ready to run, without a core."""
        waited, seconds = self.between("main_queue_seconds"), self.sampled_seconds
        return min(1.0, waited / seconds) if waited is not None and seconds else None

    @property
    def sampled_seconds(self) -> float:
        return self.samples[-1].time - self.samples[0].time if len(self.samples) > 1 else 0.0


@dataclass(frozen=True)
class ScriptProfile:
    run: Run
    ranks: list[RankFacts]
    windows: RankWindows | None


def read_script_profile(run: Run) -> ScriptProfile:
    workers = sorted(int(worker["rank"]) for worker in run.workers)
    ranks = [one for rank in workers if (one := _read_rank(run, rank)) is not None]
    return ScriptProfile(run, ranks, rank_windows({one.rank: one.events for one in ranks}))


def _read_rank(run: Run, rank: int) -> RankFacts | None:
    path = run.folder.events_file(rank)
    events = read_iterations(path)
    if not events.blocks:
        return None
    start: Mapping[str, Any] = {}
    facts: list[Mapping[str, Any]] = []
    for event in read_lines(path):
        if event.get("event") == "start":
            start, facts = event, []
        elif event.get("event") == "facts":
            facts.append(event)
    host = str(start.get("host", ""))
    if not facts:
        return RankFacts(rank, host, events)
    # Not every event has the calls.
    last = next((one for one in reversed(facts) if "calls" in one), facts[-1])
    return RankFacts(
        rank,
        host,
        events,
        _integer(last.get("threads")),
        last.get("omp_num_threads"),
        _integer(last.get("cores")),
        _bits(last.get("core_set")),
        [_call(one) for one in _objects(last.get("calls"))],
        [_loader(one) for one in _objects(last.get("loaders"))],
        [_ddp_model(one) for one in _objects(last.get("ddp_models"))],
        [_copies(one) for one in _objects(last.get("copies"))],
        [_sample(one) for one in facts],
        _integer(last.get("steps")) or 0,
    )


def cores_of(ranks: Sequence[RankFacts]) -> int | None:
    """The cores that ranks of one machine may use together; None if unknown.

    Each may be bound to cores of its own. A CPU quota, which allows fewer than those, is shared.
    """
    together = 0
    for one in ranks:
        if one.core_set is None or one.cores != one.core_set.bit_count():
            return ranks[0].cores
        together |= one.core_set
    return together.bit_count()


def _objects(values: Any) -> Iterable[Mapping[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _bits(value: Any) -> int | None:
    try:
        return int(value, 16) if isinstance(value, str) else None
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _line(one: Mapping[str, Any]) -> Line | None:
    if not isinstance(one.get("file"), str) or type(one.get("line")) is not int:
        return None
    made_in = _library_line(one.get("library"))
    return Line(one["file"], one["line"], str(one.get("code", "")), made_in)


def _library_line(one: Any) -> LibraryLine | None:
    line = _line(one) if isinstance(one, dict) else None
    return LibraryLine(line.file, line.number) if line else None


def _call(one: Mapping[str, Any]) -> Call:
    return Call(*_of_line(one))


def _copies(one: Mapping[str, Any]) -> Copies:
    more = (_integer(one.get(name)) or 0 for name in ("pageable_bytes", "blocking_bytes"))
    return Copies(*_of_line(one), *more)


def _of_line(one: Mapping[str, Any]) -> tuple[str, Line, int, int, float, int]:
    """What was counted by line."""
    return (
        str(one.get("call", "?")),
        _line(one) or Line("?", 0),
        _integer(one.get("count")) or 0,
        _integer(one.get("steps")) or 0,
        _number(one.get("seconds")) or 0.0,
        _integer(one.get("bytes")) or 0,
    )


def _loader(one: Mapping[str, Any]) -> Loader:
    return Loader(
        _line(one),
        _integer(one.get("workers")) or 0,
        _integer(one.get("batches")) or 0,
        _number(one.get("seconds")) or 0.0,
    )


def _ddp_model(one: Mapping[str, Any]) -> DdpModel:
    sizes = one.get("bucket_bytes")
    return DdpModel(
        _line(one),
        tuple(size for size in sizes if type(size) is int) if isinstance(sizes, list) else (),
        one.get("find_unused_parameters") is True,
        _integer(one.get("unused_bytes")) or 0,
        one.get("same_parameters_unused") is True,
        _integer(one.get("searches")) or 0,
        _number(one.get("search_seconds")) or 0.0,
    )


def _sample(one: Mapping[str, Any]) -> ProcessSample:
    return ProcessSample(
        _number(one.get("time")) or 0.0,
        _integer(one.get("steps")) or 0,
        _number(one.get("cpu_seconds")) or 0.0,
        _number(one.get("queue_seconds")),
        _number(one.get("main_queue_seconds")),
        _number(one.get("rss_bytes")),
        _number(one.get("gpu_allocated_bytes")),
    )
