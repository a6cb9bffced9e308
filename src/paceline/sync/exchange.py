"""Summing gradients over the workers: how (an algorithm) and in what form (a codec)."""

from __future__ import annotations

from threading import Lock
from time import perf_counter

import torch
from torch import Tensor

from paceline.codec import create as create_codec
from paceline.codec.codec import Shapes, drive
from paceline.comm import ALGORITHMS
from paceline.comm.algorithms.library import Library
from paceline.comm.communicator import Communicator
from paceline.comm.work import Done, Work

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


class Underway:
    """How long at least one of several overlapping exchanges was under way; for any thread."""

    def __init__(self) -> None:
        self.ended = 0.0
        """When the last one ended."""
        self._seconds = 0.0
        self._exchanges = 0
        self._since = 0.0
        self._lock = Lock()

    def begin(self) -> None:
        with self._lock:
            if self._exchanges == 0:
                self._since = perf_counter()
            self._exchanges += 1

    def end(self) -> None:
        with self._lock:
            self.ended = perf_counter()
            self._exchanges -= 1
            if self._exchanges == 0:
                self._seconds += self.ended - self._since

    def take_seconds(self) -> float:
        """Those since the last time asked."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds
