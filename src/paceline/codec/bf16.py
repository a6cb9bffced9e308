"""bfloat16: the upper half of a float32.

The range is that of float32, so nothing overflows or vanishes; of the 24 bits of precision 8 stay.
Each worker's entry is rounded by at most 2^-8 of itself, and so is each addition on the way, since
the sum is carried out in bfloat16 too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codec.codec import Codec, Exchange, Shapes, WireBytes, summed


class BFloat16(Codec):
    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        total = yield from summed(gradient.to(torch.bfloat16))
        return gradient.copy_(total)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(sums=(elements * torch.bfloat16.itemsize,))
