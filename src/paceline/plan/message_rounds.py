"""The rounds of collectives, as comm/algorithms and gloo perform them.

An algorithm on P workers is a sequence of rounds (`rounds_of`). In a round, workers exchange
messages, and the busiest link carries `link_bytes` in one direction. `MESSAGE_ROUNDS` has the
messages of algorithms whose rounds differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Equal rounds of an algorithm, one after the other."""

    count: int
    link_bytes: float
    """Bytes that the busiest link carries in one direction, in one round."""
    messages: int = 1
    """That the busiest worker receives or sends, in one round."""
    alternates: bool = False
    """Whether the busiest link carries them in turns in one direction and in the other."""
    is_there_and_back: bool = False
    """Whether the busiest link carries half of the rounds in each direction."""

    @property
    def one_way_bytes(self) -> float:
        """Of all rounds, in one direction of the busiest link."""
        return self.count * self.link_bytes / (2 if self.is_there_and_back else 1)


def rounds_of(
    operation: str, algorithm: str, workers: int, size_bytes: float
) -> tuple[Rounds, ...]:
    """The rounds of a collective, as comm/algorithms and gloo perform it.

    `size_bytes` is that of the whole tensor, as in `paceline comm`.
    """
    if workers < 2:
        return ()
    peers, chunk = workers - 1, size_bytes / workers
    depth = math.ceil(math.log2(workers))
    if operation == "all_reduce":
        if algorithm in ("ring", "library"):
            return (Rounds(2 * peers, chunk),)
        if algorithm == "root":
            return (Rounds(2, peers * size_bytes, peers, alternates=True, is_there_and_back=True),)
        if algorithm == "tree":
            return (Rounds(2 * depth, size_bytes, is_there_and_back=True),)
        if algorithm == "halving_doubling":
            halvings = workers.bit_length() - 1
            halves = tuple(Rounds(2, size_bytes / 2**step) for step in range(1, halvings + 1))
            # Ranks beyond a power of two send everything to a partner, and get everything back.
            rest = (Rounds(2, size_bytes, is_there_and_back=True),)
            return halves if workers == 1 << halvings else (*rest, *halves)
    by_operation = {
        "reduce_scatter": Rounds(peers, chunk),
        "all_gather": Rounds(peers, chunk),
        "gather": Rounds(1, peers * chunk, peers),
        "scatter": Rounds(1, peers * chunk, peers),
        "broadcast": Rounds(depth, size_bytes),
        "send_recv": Rounds(1, size_bytes),
    }
    if operation not in by_operation:
        raise ValueError(f"no rounds are known for {operation} by {algorithm}")
    return (by_operation[operation],)


def round_count(operation: str, algorithm: str, workers: int) -> int:
    return sum(each.count for each in rounds_of(operation, algorithm, workers, 1.0))


@dataclass(frozen=True, slots=True)
class MessageRound:
    """A worker sends at most one of its messages, and receives at most one."""

    senders: Ranks
    receivers: Ranks
    share: float
    """Size of each message, relative to the tensor."""


def tree_rounds(workers: int) -> Iterator[MessageRound]:
    """Sums go from children to parents, and back."""
    steps = [1 << bit for bit in range((workers - 1).bit_length())]
    for step in steps:
        parents = np.arange(0, workers - step, 2 * step)
        yield MessageRound(parents + step, parents, 1.0)
    for step in reversed(steps):
        parents = np.arange(0, workers - step, 2 * step)
        yield MessageRound(parents, parents + step, 1.0)


def halving_doubling_rounds(workers: int) -> Iterator[MessageRound]:
    """Ranks beyond a power of two send everything to a partner, and get everything back."""
    active = 1 << (workers.bit_length() - 1)
    extra = workers - active
    index, evens = np.arange(active), 2 * np.arange(extra)
    ranks = np.where(index < extra, 2 * index, index + extra)
    if extra:
        yield MessageRound(evens + 1, evens, 1.0)
    widths = [active >> step for step in range(1, active.bit_length())]
    for width in [*widths, *reversed(widths)]:
        yield MessageRound(ranks, ranks[index ^ width], width / active)
    if extra:
        yield MessageRound(evens, evens + 1, 1.0)


MESSAGE_ROUNDS = {"tree": tree_rounds, "halving_doubling": halving_doubling_rounds}
