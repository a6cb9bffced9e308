"""Summing gradients over the workers: how (an algorithm) and in what form (a codec)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec import create as create_codec
from paceline.codec.codec import Shapes, drive
from paceline.comm import ALGORITHMS
from paceline.comm.communicator import Communicator

KIND = "gradients"


class GradientExchange:
    """Replaces gradients by their sum over all workers."""

    def __init__(self, algorithm: str, codec: str, codec_options: dict[str, str]) -> None:
        self.algorithm = ALGORITHMS.load(algorithm)()
        self.codec = None if codec == "none" else create_codec(codec, codec_options)

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
