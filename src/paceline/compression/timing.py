"""Time that a worker spends on encoding and decoding, without communication."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Shapes, drive


def exchange_seconds(
    codec: Codec,
    gradient: Tensor,
    world_size: int,
    shapes: Shapes = (),
    clock: Callable[[], float] = perf_counter,
) -> float:
    """Return the seconds of one exchange, in which copies replace the payloads of the others.

    The time of the copies is not included. The gradient may be overwritten.
    """
    copying = 0.0

    def now() -> float:
        if gradient.is_cuda:
            torch.cuda.synchronize(gradient.device)
        return clock()

    def copies(payload: Tensor) -> list[Tensor]:
        nonlocal copying
        began = now()
        received = [payload.clone() for _ in range(world_size)]
        copying += now() - began
        return received

    began = now()
    drive(codec.exchange("gradient", gradient, shapes), lambda payload: payload, copies)
    return now() - began - copying
