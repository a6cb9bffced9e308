"""int8: a scale for each chunk of the gradient, and whole numbers from -127 to 127.

The scale of a chunk is its largest magnitude / 127, so rounding to the nearest whole number leaves
an error of at most half a scale. Nearest is chosen over random rounding: error feedback takes care
of the bias, and nothing random has to be seeded or checkpointed. Sums of int8 do not fit in int8,
and the workers' scales differ; so every worker gathers all the payloads and adds them up itself.
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

LARGEST_CODE = 127


class Int8(Codec):
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
        """The payload, and the values that it decodes to."""
        chunks = self._in_chunks(values)
        scales = torch.maximum(chunks.amax(1), -chunks.amin(1)) / LARGEST_CODE
        # A chunk too small for its scale to be a normal number is sent as zeros and waits. One that
        # holds a NaN or an infinity has it in its scale, and whatever the codes are, decodes to it.
        normal = scales >= torch.finfo(scales.dtype).tiny
        scales = torch.where(normal | scales.isnan(), scales, 0)
        inverses = torch.where(normal & scales.isfinite(), 1 / scales, 0)
        rounded = (chunks * inverses[:, None]).round_()
        payload = pack(scales, rounded.to(torch.int8).flatten()[: len(values)])
        return payload, rounded.mul_(scales[:, None]).flatten()[: len(values)]

    def _sum(self, payloads: list[Tensor], total: Tensor) -> Tensor:
        """Decode into `total`, adding in rank order so that all workers round alike."""
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
        """One chunk a row; the last is filled up with zeros, which are never sent."""
        width = self._width(len(values))
        missing = -len(values) % width
        return (pad(values, (0, missing)) if missing else values).view(-1, width)

    def _width(self, elements: int) -> int:
        """Of a chunk in memory; a short gradient is not filled up to a long chunk."""
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
