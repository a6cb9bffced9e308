"""The identity: what every other codec is measured against.

bfloat16: the upper half of a float32.

The range is that of float32, so nothing overflows or vanishes; of the 24 bits of precision 8 stay.
Each worker's entry is rounded by at most 2^-8 of itself, and so is each addition on the way, since
the sum is carried out in bfloat16 too.

float16 under a scale that all workers share.

float16 is more precise than bfloat16 (11 bits against 8) but ends at 65504 and at 6e-8, and
gradients of 1e-7 are common. So the workers first gather the largest magnitude that each one holds.
Their sum bounds every entry of the result, hence the scale that puts this sum just below 2^15 lets
nothing overflow, neither a worker's entry nor any partial sum. The scale is a power of two:
multiplying by it and dividing by it rounds nothing. Entries keep their 11 bits down to 2^-28 of
that bound, and fewer and fewer down to 2^-39 of it, where they vanish."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Exchange, Shapes, WireBytes, gathered, summed


class Uncompressed(Codec):
    lossless = True

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        return summed(gradient)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * element_bytes,))


class BFloat16(Codec):
    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        total = yield from summed(gradient.to(torch.bfloat16))
        return gradient.copy_(total)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * torch.bfloat16.itemsize,))


HEADROOM_EXPONENT = 15
"""One below float16's largest exponent, so that rounding up on the way cannot overflow either."""


class Float16(Codec):
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
    """Of the power of two to scale by; 0 where there is nothing to scale, or a NaN or infinity."""
    bound = sum(maxima)
    if bound == 0 or not math.isfinite(bound):
        return 0
    # The power of two and its inverse must both be normal numbers of the gradient's type.
    limit = 1 - math.frexp(torch.finfo(dtype).tiny)[1]
    return max(-limit, min(limit, HEADROOM_EXPONENT - math.frexp(bound)[1]))
