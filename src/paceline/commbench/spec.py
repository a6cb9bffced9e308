"""Sizes of tensors as text: 4k, 1m, 37m; k, m and g are powers of 1024, as memory is counted.

Bus bandwidth: how fast the busiest link would have to be, at the least, for what was measured.

An operation on n bytes that takes t seconds has the algorithm bandwidth n / t. That falls as
workers are added, even on a perfect network, since more than n bytes must move. Its factor says how
many times n the busiest worker has to send or receive, whatever the algorithm; times that, the
bandwidth can be held against the link's for any number of workers.

What to measure, and between whom; refused before anything starts where it cannot be done."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm import ALGORITHMS
from paceline.config import RunConfig, cluster_spec, from_mapping
from paceline.errors import ConfigError, UsageError, shown

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
LEAST_BYTES, MOST_BYTES = 4, 8 * 2**30
FIRST_BYTES, LAST_BYTES = 2**10, 2**28
"""Of the sizes that are measured unless others are asked for."""


def parse_size(text: str) -> int:
    """Bytes; ValueError says what would do."""
    match = re.fullmatch(r"([0-9]{1,19})\s*([kmg]?)(i?b)?", text.strip().lower())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise ValueError(f"a size from 4 to 8g such as 4k, 1m or 256m, got {shown(text)}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """In ascending order, each once."""
    sizes = {parse_size(part) for part in text.split(",") if part.strip()}
    if not sizes:
        raise ValueError("sizes such as 4k,1m,37m")
    return tuple(sorted(sizes))


def doubling(last_bytes: int) -> tuple[int, ...]:
    """From the first size on, each twice the one before, up to a last one."""
    sizes = [FIRST_BYTES]
    while sizes[-1] * 2 <= last_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if last_bytes >= FIRST_BYTES else (last_bytes,)


def size_text(size_bytes: int) -> str:
    """As short as is exact: 4 KiB, 37 MiB, 1020 B."""
    for letter in ("g", "m", "k"):
        if size_bytes % UNITS[letter] == 0:
            return f"{size_bytes // UNITS[letter]} {letter.upper()}iB"
    return f"{size_bytes} B"


BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda workers: 2 * (workers - 1) / workers,
    "reduce_scatter": lambda workers: (workers - 1) / workers,
    "all_gather": lambda workers: (workers - 1) / workers,
    "broadcast": lambda workers: 1.0,
    "gather": lambda workers: (workers - 1) / workers,
    "scatter": lambda workers: (workers - 1) / workers,
    "send_recv": lambda workers: 1.0,
}
"""n is the whole tensor: for gather and scatter, what the root has; for send_recv, one message."""


OPERATIONS = tuple(BUS_FACTORS)
COMMUNICATORS = ("torch", "hierarchical")
OWN_ALGORITHM = "library"
"""The communicator's own way, and the only one of operations other than all_reduce."""

MACHINE_FIELDS = (
    "nnodes",
    "nproc_per_node",
    "node_rank",
    "master_addr",
    "master_port",
    "hosts",
    "cluster",
    "launcher",
    "device",
    "threads",
    "rendezvous_seconds",
    "timeout_seconds",
)
"""The settings of a run that say where its workers and their tensors are, with the same meaning."""


@dataclass(frozen=True, slots=True)
class Case:
    """One of the things that are compared."""

    operation: str
    communicator: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class BenchmarkSpec:
    machines: RunConfig
    """Only its MACHINE_FIELDS count."""
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    communicators: tuple[str, ...]
    repeats: int | None
    """Of each measurement; None: as many as fit into `seconds`."""
    seconds: float
    """To be spent on each size of each way, warm-up left out."""
    most_seconds: float
    """A way in which one operation took longer is not taken to larger sizes."""
    link_bits_per_second: float | None
    """What a machine's link should carry, in each direction; None: nobody said."""

    def ways(self) -> list[Case]:
        return [
            Case(operation, communicator, algorithm)
            for operation in self.operations
            for communicator in self.communicators
            for algorithm in (self.algorithms if operation == "all_reduce" else (OWN_ALGORITHM,))
        ]

    def to_dict(self) -> dict[str, Any]:
        values = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name != "machines"
        }
        settings = self.machines.to_dict()
        return {**values, "machines": {name: settings[name] for name in MACHINE_FIELDS}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchmarkSpec:
        lists = ("sizes", "operations", "algorithms", "communicators")
        return cls(
            **{
                **values,
                **{name: tuple(values[name]) for name in lists},
                "machines": machines(values["machines"]),
            }
        )


def machines(values: Mapping[str, Any]) -> RunConfig:
    """The settings of a run with these workers."""
    return from_mapping({**values, "batch_per_worker": 1})


def check_workers(count: int) -> None:
    if count < 2:
        raise UsageError("comm: takes two workers or more: give --nproc-per-node 2")


def make_plan(
    where: Mapping[str, Any],
    *,
    sizes: str | None = None,
    max_size: str | None = None,
    operations: str = "all_reduce",
    algorithms: str | None = None,
    communicators: str | None = None,
    repeats: int | None = None,
    seconds: float = 0.3,
    most_seconds: float = 2.0,
    link: str | None = None,
) -> BenchmarkSpec:
    """From the words of a command line; every problem is reported at once."""
    problems: list[str] = []

    def read(flag: str, parse: Any, text: str | None, default: Any) -> Any:
        try:
            return default if text is None else parse(text)
        except ValueError as error:
            problems.append(f"{flag}: must be {error}")
            return default

    if sizes is not None and max_size is not None:
        problems.append("--sizes and --max-size: give one of them, not both")
    chosen = read("--sizes", parse_sizes, sizes, ())
    last = read("--max-size", parse_size, max_size, LAST_BYTES)
    link_rate = read("--link", cluster_spec.bits_per_second, link, None)
    if repeats is not None and not 1 <= repeats <= 10_000:
        problems.append(f"--repeats: must be from 1 to 10000, got {shown(repeats)}")
    for flag, value in (("--seconds", seconds), ("--most-seconds", most_seconds)):
        if not 0 < value <= 3600:
            problems.append(f"{flag}: must be above 0 and at most 3600, got {value:g}")
    names = [entry.name for entry in ALGORITHMS]
    picked = {
        "operations": _pick("--operations", operations, OPERATIONS, problems),
        "algorithms": _pick("--algorithms", algorithms, names, problems),
        "communicators": _pick("--communicators", communicators, COMMUNICATORS, problems),
    }
    try:
        config = machines(where)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    if communicators is None and config.nproc_per_node == 1:
        # Where every machine has one worker, the two are the same.
        picked["communicators"] = COMMUNICATORS[:1]
    return BenchmarkSpec(
        machines=config,
        sizes=chosen or doubling(last),
        repeats=repeats,
        seconds=seconds,
        most_seconds=most_seconds,
        link_bits_per_second=link_rate,
        **picked,
    )


def _pick(
    flag: str, text: str | None, known: Sequence[str], problems: list[str]
) -> tuple[str, ...]:
    """All where nothing is said."""
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in known] if names else [text]
    problems += [
        f"{flag}: must be some of {', '.join(known)}, got {shown(name)}" for name in unknown
    ]
    return names
