"""What a benchmark measures and where: sizes, operations and machines, validated before the start.

An operation on n bytes that takes t seconds has the algorithm bandwidth (algbw) n / t. It falls as
workers are added, even on a perfect network, because more than n bytes must move. Multiplied by
the operation's bus factor it is the bus bandwidth (busbw), which can be compared to the bandwidth
of a link for any number of workers: the factor is how many times n the busiest worker must send or
receive.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm.algorithms import ALGORITHMS
from paceline.compression import CODECS
from paceline.config import RunConfig, cluster_spec, from_mapping
from paceline.errors import ConfigError, UsageError, shown

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
MIN_BYTES, MAX_BYTES = 4, 8 * 2**30
FIRST_BYTES, LAST_BYTES = 2**10, 2**28
"""Range of the default sizes."""


def parse_size(text: str) -> int:
    """Bytes of a size such as 4k, 1m or 37m, where k, m and g are powers of 1024.

    The message of the ValueError completes the sentence "must be ...".
    """
    match = re.fullmatch(r"([0-9]{1,19})\s*([kmg]?)(i?b)?", text.strip().lower())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not MIN_BYTES <= size <= MAX_BYTES:
        raise ValueError(f"a size from 4 to 8g such as 4k, 1m or 256m, got {shown(text)}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Distinct sizes of a comma-separated list, ascending."""
    sizes = {parse_size(part) for part in text.split(",") if part.strip()}
    if not sizes:
        raise ValueError("a list of sizes such as 4k,1m,37m")
    return tuple(sorted(sizes))


def doubling(last_bytes: int) -> tuple[int, ...]:
    """FIRST_BYTES and its doublings up to `last_bytes`."""
    sizes = [FIRST_BYTES]
    while sizes[-1] * 2 <= last_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if last_bytes >= FIRST_BYTES else (last_bytes,)


def size_text(size_bytes: int) -> str:
    """The largest unit that is exact: 4 KiB, 37 MiB, 1020 B."""
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
"""By number of workers. n is the whole tensor: for gather and scatter the root's, for send_recv one
message."""
OPERATIONS = tuple(BUS_FACTORS)
COMMUNICATORS = ("torch", "hierarchical")
OWN_ALGORITHM = "library"
"""The communicator's own implementation; operations other than all_reduce have no other."""

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
"""The fields of RunConfig that define workers and devices; they mean the same as in training."""


@dataclass(frozen=True, slots=True)
class Case:
    """A combination that is timed and compared with the others."""

    operation: str
    communicator: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class BenchmarkSpec:
    machines: RunConfig
    """Only its MACHINE_FIELDS are used."""
    sizes: tuple[int, ...]
    """Bytes, ascending."""
    operations: tuple[str, ...]
    algorithms: tuple[str, ...]
    communicators: tuple[str, ...]
    repeats: int | None
    """Of each measurement; None: as many as fit in `seconds`."""
    seconds: float
    """Time budget of each size of each case, without warm-up."""
    most_seconds: float
    """Larger sizes of a case are skipped once one operation takes longer than this."""
    link_bits_per_second: float | None
    """Nominal bandwidth of a machine's link in each direction; None: unknown."""
    pause_seconds: float = 0.0
    """Before each operation, which is then timed alone; 0: without pauses, in batches."""
    codecs: tuple[str, ...] = ()
    """Whose encoding and decoding is timed too."""

    def cases(self) -> list[Case]:
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
        lists = ("sizes", "operations", "algorithms", "communicators", "codecs")
        return cls(
            **{
                **values,
                **{name: tuple(values[name]) for name in lists if name in values},
                "machines": machines(values["machines"]),
            }
        )


def machines(values: Mapping[str, Any]) -> RunConfig:
    """A RunConfig with these machine settings."""
    return from_mapping({**values, "batch_per_worker": 1})


def check_workers(count: int) -> None:
    if count < 2:
        raise UsageError("comm: needs at least two workers: set --nproc-per-node 2")


def make_spec(
    machine_settings: Mapping[str, Any],
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
    pause: float = 0.0,
    codecs: str | None = None,
) -> BenchmarkSpec:
    """Parse command-line values; ConfigError reports all problems at once."""
    problems: list[str] = []

    def read(flag: str, parse: Any, text: str | None, default: Any) -> Any:
        try:
            return default if text is None else parse(text)
        except ValueError as error:
            problems.append(f"{flag}: must be {error}")
            return default

    if sizes is not None and max_size is not None:
        problems.append("--sizes and --max-size: set only one of them")
    selected_sizes = read("--sizes", parse_sizes, sizes, ())
    last = read("--max-size", parse_size, max_size, LAST_BYTES)
    link_rate = read("--link", cluster_spec.bits_per_second, link, None)
    if repeats is not None and not 1 <= repeats <= 10_000:
        problems.append(f"--repeats: must be from 1 to 10000, got {shown(repeats)}")
    for flag, value in (("--seconds", seconds), ("--most-seconds", most_seconds)):
        if not 0 < value <= 3600:
            problems.append(f"{flag}: must be above 0 and at most 3600, got {value:g}")
    if not 0 <= pause <= 60:
        problems.append(f"--pause: must be from 0 to 60, got {pause:g}")
    names = [entry.name for entry in ALGORITHMS]
    selected = {
        "operations": _select("--operations", operations, OPERATIONS, problems),
        "algorithms": _select("--algorithms", algorithms, names, problems),
        "communicators": _select("--communicators", communicators, COMMUNICATORS, problems),
        "codecs": () if codecs is None else _select("--codecs", codecs, CODECS.names(), problems),
    }
    try:
        config = machines(machine_settings)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if problems:
        raise ConfigError(problems)
    if communicators is None and config.nproc_per_node == 1:
        # With one worker per machine both communicators are the same.
        selected["communicators"] = COMMUNICATORS[:1]
    return BenchmarkSpec(
        machines=config,
        sizes=selected_sizes or doubling(last),
        repeats=repeats,
        seconds=seconds,
        most_seconds=most_seconds,
        link_bits_per_second=link_rate,
        pause_seconds=pause,
        **selected,
    )


def _select(
    flag: str, text: str | None, known: Sequence[str], problems: list[str]
) -> tuple[str, ...]:
    """The named items of a comma-separated list; all without one."""
    if text is None:
        return tuple(known)
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in known] if names else [text]
    problems += [
        f"{flag}: must be some of {', '.join(known)}, got {shown(name)}" for name in unknown
    ]
    return names
