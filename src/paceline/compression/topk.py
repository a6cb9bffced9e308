"""top-k: each worker sends its entries of largest magnitude, and where they are.

Most of a gradient is small. What is not sent is not lost: it stays pending until it has grown to be
among the largest. The workers pick different entries, so the payloads are gathered, not summed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
from paceline.errors import ConfigError

INDEX_TYPE = torch.int32
LARGEST_GRADIENT = torch.iinfo(INDEX_TYPE).max


class TopK(Codec):
    def __init__(self, *, ratio: float = 0.01) -> None:
        check_option("ratio", ratio, above=0, maximum=1)
        self.ratio = ratio
        self._feedback = ErrorFeedback()

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        pending = self._feedback.add(key, gradient)
        kept = self.kept(gradient.numel())
        # NaN counts as the largest of all, so it is always among what is sent.
        indices = pending.abs().topk(kept, sorted=False).indices
        payload = pack(indices.to(INDEX_TYPE), pending[indices])
        pending[indices] = 0
        total = gradient.zero_()
        for copy in (yield from gathered(payload)):
            their_indices, values = unpack(copy, (kept, INDEX_TYPE), (kept, gradient.dtype))
            total[their_indices] += values
        return total

    def kept(self, elements: int) -> int:
        """How many entries are sent: at least one, where there is any."""
        if elements > LARGEST_GRADIENT:
            raise ConfigError([f"codec topk: takes at most {LARGEST_GRADIENT} elements at once"])
        return min(elements, max(1, round(self.ratio * elements)))

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(gathers=(self.kept(elements) * (INDEX_TYPE.itemsize + element_bytes),))

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def state_dict(self) -> State:
        return {"pending": self._feedback.state()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._feedback.load(state["pending"])
