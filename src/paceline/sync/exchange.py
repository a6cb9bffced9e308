"""Summing gradients over the workers: how (an algorithm) and in what form (a codec)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import ALGORITHMS
from paceline.comm.algorithms.library import Library
from paceline.comm.communicator import Communicator
from paceline.comm.work import Done, Work
from paceline.compression import create as create_codec
from paceline.compression.codec import Shapes, drive
from paceline.measure.timeline import Moment, Timeline

KIND = "gradients"


class GradientExchange:
    """Replaces gradients by their sum over all workers."""

    def __init__(self, algorithm: str, codec: str, codec_options: dict[str, str]) -> None:
        self.algorithm = ALGORITHMS.load(algorithm)()
        self.codec = None if codec == "none" else create_codec(codec, codec_options)
        self.returns_at_once = self.codec is None and isinstance(self.algorithm, Library)
        """Whether `begin` leaves the work to the library, which needs no thread of ours for it."""

    def begin(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> Work:
        """Like `sum`, but the sum is there only after `wait()`. Collective."""
        if self.returns_at_once:
            return communicator.all_reduce(gradient, KIND)
        self.sum(communicator, key, gradient, shapes)
        return Done()

    def sum(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> None:
        """In place, over a flat contiguous gradient; blocks until the sum is there. Collective.

        `key` names the gradient in every step; `shapes` are those of the tensors within it.
        """
        if communicator.world_size == 1:
            return
        if self.codec is None:
            self.algorithm.all_reduce(communicator, gradient, KIND)
            return
        total = drive(
            self.codec.exchange(key, gradient, shapes),
            lambda payload: self._summed(communicator, payload),
            lambda payload: gathered(communicator, payload),
        )
        if total is not gradient:
            gradient.copy_(total)

    def _summed(self, communicator: Communicator, payload: Tensor) -> Tensor:
        self.algorithm.all_reduce(communicator, payload, KIND)
        return payload


def gathered(communicator: Communicator, payload: Tensor) -> list[Tensor]:
    """Every worker's payload, in the ranks' order."""
    size = payload.numel()
    everything = torch.empty(size * communicator.world_size, dtype=payload.dtype)
    everything = everything.to(payload.device)
    everything[communicator.rank * size :][:size] = payload
    communicator.all_gather(everything, KIND).wait()
    return list(everything.split(size)) if size else [payload] * communicator.world_size


@dataclass(slots=True)
class Exchange:
    """One that is under way: from when its gradient was ready to when its sum was there."""

    began: Moment
    ended: Moment | None = None


class Underway:
    """The exchanges of a step, which may overlap; they may end on any thread."""

    def __init__(self, timeline: Timeline) -> None:
        """`timeline`: of the device that computes the gradients."""
        self._timeline = timeline
        self._exchanges: list[Exchange] = []

    def begin(self) -> Exchange:
        """An exchange of what the current stream computes; its `ended` has to be set."""
        exchange = Exchange(self._timeline.mark())
        self._exchanges.append(exchange)
        return exchange

    def take(self) -> list[Exchange]:
        """Those since the last time asked."""
        exchanges, self._exchanges = self._exchanges, []
        return exchanges

    def spans(self, exchanges: Sequence[Exchange]) -> list[tuple[float, float]]:
        """When they began and ended, in seconds of `perf_counter`; waits until they are over."""
        seconds = self._timeline.seconds
        spans = []
        for exchange in exchanges:
            assert exchange.ended is not None, "the exchange is still under way"
            spans.append((seconds(exchange.began), seconds(exchange.ended)))
        return spans


def seconds_under_way(spans: Iterable[tuple[float, float]], until: float = math.inf) -> float:
    """How long at least one exchange was under way, up to a moment."""
    total, last = 0.0, -math.inf
    for began, ended in sorted(spans):
        end = min(ended, until)
        total += max(0.0, end - max(began, last))
        last = max(last, end)
    return total
