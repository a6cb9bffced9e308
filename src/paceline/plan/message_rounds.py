"""The messages of all-reduce algorithms whose rounds differ, as comm/algorithms sends them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


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
