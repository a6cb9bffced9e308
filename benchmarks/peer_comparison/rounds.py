"""Interleaved blocks and their statistics.

Background load varies, so contenders are interleaved in short blocks, in an order that rotates from
round to round, and ratios compare adjacent blocks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter


@dataclass(frozen=True)
class Block:
    at: float
    """Midpoint of the block on this process's clock."""
    seconds: float
    """Time of one update or one collective."""


MOST_IN_A_BLOCK = 2000
"""Bounds a block if the first calls were much faster than later ones."""

Blocks = dict[str, list[Block]]


@dataclass(frozen=True)
class Spread:
    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high, len(values))

    @classmethod
    def of_blocks(cls, blocks: Sequence[Block]) -> Spread:
        return cls.of([block.seconds for block in blocks])


@dataclass(frozen=True)
class Length:
    """How long to measure."""

    block_seconds: float
    table_seconds: float
    """Time limit for the rounds of a table or of one of its rows."""
    fewest_repeats: int
    most_repeats: int

    def count(self, one_seconds: float) -> int:
        """Number of calls of `one_seconds` in a block."""
        return min(MOST_IN_A_BLOCK, max(1, round(self.block_seconds / one_seconds)))

    def repeats(self, round_seconds: float) -> int:
        wanted = int(self.table_seconds / round_seconds)
        return max(self.fewest_repeats, min(self.most_repeats, wanted))


def take_turns(names: Sequence[str], repeats: int, run: Callable[[str], float | None]) -> Blocks:
    """Call `run` in turn; it returns the seconds of a block, or None to drop the contender."""
    blocks: Blocks = {name: [] for name in names}
    for number in range(repeats):
        turn = number % len(names)
        for name in [*names[turn:], *names[:turn]]:
            if name not in blocks:
                continue
            began = perf_counter()
            seconds = run(name)
            if seconds is None:
                del blocks[name]
            else:
                blocks[name].append(Block((began + perf_counter()) / 2, seconds))
    return blocks


def speed_ups(own: Sequence[Block], reference: Sequence[Block]) -> list[float]:
    """Speedup of each block over the nearest block of the reference."""
    return [
        min(reference, key=lambda other: abs(other.at - block.at)).seconds / block.seconds
        for block in own
    ]


def milliseconds(seconds: float) -> str:
    """About three digits, at most six characters up to a hundred seconds."""
    value = 1e3 * seconds
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:.{digits}f}"


def ratio_text(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def quartiles(spread: Spread, text: Callable[[float], str] = milliseconds) -> str:
    return f"{text(spread.low)}-{text(spread.high)}"


def verdict(value: float, goal: float | None) -> str:
    """The goal, and whether it is met."""
    return "" if goal is None else f"{goal:g} {'met' if value >= goal else 'missed'}"


class Skipped:
    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, title: str, place: str, reason: str) -> None:
        self._places.setdefault((title, reason), []).append(place)

    def lines(self) -> list[str]:
        return [
            f"{title} ({', '.join(places)}): {reason}"
            for (title, reason), places in self._places.items()
        ]


@contextmanager
def progress(what: str) -> Iterator[None]:
    began = monotonic()
    sys.stdout.flush()  # Print pending results before the progress line.
    print(f"  ... {what}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f" ({monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
