"""Codec `int8`: 8-bit integers from -127 to 127 with one scale per chunk of the gradient.

The scale of a chunk is its largest magnitude / 127, so rounding to the nearest integer leaves an
error of at most half a scale. Rounding is deterministic instead of stochastic: error feedback
removes the bias, and no random state has to be seeded or checkpointed. Sums of int8 overflow int8
and the scales of workers differ, so every worker gathers all payloads and sums them itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.compression.codec import (
    Codec,
    Exchange,
    Shapes,
    State,
    WireBytes,
    gathered,
    pack,
    unpack,
)
from paceline.compression.error_feedback import ErrorFeedback
from paceline.config.conversion import check_option

MAX_CODE = 127


class Int8(Codec):
    """8-bit quantization; `chunk` is the number of elements that share a scale."""

    keeps_norm = True

    def __init__(self, *, chunk: int = 1024) -> None:
        check_option("chunk", chunk, minimum=1, maximum=10**16)
        self.chunk = chunk
        self._feedback = ErrorFeedback()

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        pending = self._feedback.add(key, gradient)
        payload, sent = self._encode(pending)
        pending.sub_(sent)
        return self._sum((yield from gathered(payload)), gradient)

    def _encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the payload and the values that it decodes to."""
        chunks = self._in_chunks(values)
        scales = torch.maximum(chunks.amax(1), -chunks.amin(1)) / MAX_CODE
        # A chunk whose scale would be subnormal is sent as zeros and stays pending. A NaN or
        # infinity in a chunk makes its scale non-finite, so it decodes to a non-finite value.
        normal = scales >= torch.finfo(scales.dtype).tiny
        scales = torch.where(normal | scales.isnan(), scales, 0)
        inverses = torch.where(normal & scales.isfinite(), 1 / scales, 0)
        rounded = (chunks * inverses[:, None]).round_()
        payload = pack(scales, rounded.to(torch.int8).flatten()[: len(values)])
        return payload, rounded.mul_(scales[:, None]).flatten()[: len(values)]

    def _sum(self, payloads: list[Tensor], total: Tensor) -> Tensor:
        """Decode into `total`, summing in rank order so that all workers round identically."""
        chunks = total.new_zeros(self._chunk_count(len(total)), self._width(len(total)))
        decoded = chunks.view(-1)[: len(total)]
        total.zero_()
        for payload in payloads:
            scales, codes = unpack(payload, (len(chunks), total.dtype), (len(total), torch.int8))
            decoded.copy_(codes)
            chunks.mul_(scales[:, None])
            total += decoded
        return total

    def _in_chunks(self, values: Tensor) -> Tensor:
        """Return one chunk per row; the last is padded with zeros, which are not sent."""
        width = self._width(len(values))
        missing = -len(values) % width
        return (pad(values, (0, missing)) if missing else values).view(-1, width)

    def _width(self, elements: int) -> int:
        """Return the chunk width in memory; a short gradient is not padded to a full chunk."""
        return min(self.chunk, max(elements, 1))

    def _chunk_count(self, elements: int) -> int:
        return -(-elements // self.chunk)

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(gathers=(self._chunk_count(elements) * element_bytes + elements,))

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def state_dict(self) -> State:
        return {"pending": self._feedback.state()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._feedback.load(state["pending"])
