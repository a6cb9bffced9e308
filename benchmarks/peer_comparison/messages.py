"""What the controlling process asks of a group's workers, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """A worker's first word, once it is connected to its group."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Prepare:
    """Build a model and train it for a few updates, whose losses are compared."""

    model: str
    batch_per_worker: int
    learning_rate: float
    updates: int


@dataclass(frozen=True)
class Prepared:
    first_loss: float
    last_loss: float
    update_seconds: float
    """Of the later ones of them: enough to choose the length of a block."""


@dataclass(frozen=True)
class Train:
    """So many updates of the prepared model; the answer is the seconds an update took."""

    updates: int


@dataclass(frozen=True)
class AllReduce:
    """Sum a tensor of that size so many times; the answer is the seconds one took."""

    size_bytes: int
    times: int
    is_plain: bool
    """An ordinary tensor, not one where the contender would have it."""


@dataclass(frozen=True)
class Copy:
    """Copy as many bytes from one place to another; the answer is the seconds one copy took."""

    size_bytes: int
    times: int


Request = Prepare | Train | AllReduce | Copy
Answer = Prepared | float


@dataclass(frozen=True)
class Refusal:
    reason: str
