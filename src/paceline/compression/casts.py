"""Codecs `none`, `bf16` and `fp16`: gradients are summed in their own or a shorter float type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Exchange, Shapes, WireBytes, gathered, summed


class Uncompressed(Codec):
    """No compression: the baseline for all other codecs."""

    lossless = True
    keeps_norm = True

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        return summed(gradient)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * element_bytes,))


class BFloat16(Codec):
    """bfloat16: the range of float32 with 8 of its 24 bits of precision.

    Nothing overflows or underflows. Each entry is rounded by a relative error of at most 2^-8, and
    so is each addition, because the sum is computed in bfloat16 too.
    """

    keeps_norm = True

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        total = yield from summed(gradient.to(torch.bfloat16))
        return gradient.copy_(total)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * torch.bfloat16.itemsize,))


HEADROOM_EXPONENT = 15
"""One below the largest exponent of float16, so that rounding up cannot overflow either."""


class Float16(Codec):
    """float16 with a scale shared by all workers.

    float16 is more precise than bfloat16 (11 bits instead of 8), but its range is 6e-8 to 65504,
    and gradients of 1e-7 are common. The workers therefore first gather their largest magnitudes.
    The sum of these bounds every entry of the result, so a scale that puts the sum just below 2^15
    prevents overflow of every entry and every partial sum. The scale is a power of two, so applying
    and removing it does not round. Entries keep 11 bits down to 2^-28 of the bound, and
    progressively fewer down to 2^-39, where they underflow.
    """

    keeps_norm = True

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        maxima = yield from gathered(_largest_magnitude(gradient))
        exponent = _shared_exponent([float(maximum) for maximum in maxima], gradient.dtype)
        total = yield from summed(gradient.mul_(2.0**exponent).to(torch.float16))
        return gradient.copy_(total).mul_(2.0**-exponent)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * torch.float16.itemsize,), gathers=(element_bytes,))


def _largest_magnitude(gradient: Tensor) -> Tensor:
    if not gradient.numel():
        return gradient.new_zeros(1)
    smallest, largest = gradient.aminmax()
    return torch.maximum(largest, -smallest).reshape(1)


def _shared_exponent(maxima: list[float], dtype: torch.dtype) -> int:
    """Return the exponent of the scale; 0 if all gradients are zero or any is not finite."""
    bound = sum(maxima)
    if bound == 0 or not math.isfinite(bound):
        return 0
    # The scale and its inverse must both be normal numbers of the gradient dtype.
    limit = 1 - math.frexp(torch.finfo(dtype).tiny)[1]
    return max(-limit, min(limit, HEADROOM_EXPONENT - math.frexp(bound)[1]))
