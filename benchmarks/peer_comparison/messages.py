"""Requests of the controlling process to the workers of a group, and their answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hello:
    """First message of a worker that has connected to its group."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Prepare:
    """Build a model and train a few updates, for comparing the losses."""

    model: str
    batch_per_worker: int
    learning_rate: float
    updates: int


@dataclass(frozen=True)
class Prepared:
    first_loss: float
    last_loss: float
    update_seconds: float
    """Of the later updates, to choose the block length."""


@dataclass(frozen=True)
class Train:
    """Train the prepared model; the answer is the seconds per update."""

    updates: int


@dataclass(frozen=True)
class AllReduce:
    """All-reduce a tensor repeatedly; the answer is the seconds per call."""

    size_bytes: int
    times: int
    is_plain: bool
    """Use an ordinary tensor instead of one in the contender's memory."""


@dataclass(frozen=True)
class Copy:
    """Copy a tensor repeatedly; the answer is the seconds per copy."""

    size_bytes: int
    times: int


Request = Prepare | Train | AllReduce | Copy
Answer = Prepared | float


@dataclass(frozen=True)
class Refusal:
    reason: str
