"""Codec `topk`: each worker sends its entries of largest magnitude and their indices.

Most entries of a gradient are small. Entries that are not sent are not lost: error feedback keeps
them until they are among the largest. Workers select different entries, so payloads are gathered
instead of summed.
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

INDEX_DTYPE = torch.int32
MAX_ELEMENTS = torch.iinfo(INDEX_DTYPE).max


class TopK(Codec):
    """Top-k sparsification; `ratio` is the fraction of entries that are sent."""

    def __init__(self, *, ratio: float = 0.01) -> None:
        check_option("ratio", ratio, above=0, maximum=1)
        self.ratio = ratio
        self._feedback = ErrorFeedback()

    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        pending = self._feedback.add(key, gradient)
        kept = self.kept(gradient.numel())
        # topk treats NaN as the largest value, so NaN is always sent.
        indices = pending.abs().topk(kept, sorted=False).indices
        payload = pack(indices.to(INDEX_DTYPE), pending[indices])
        pending[indices] = 0
        total = gradient.zero_()
        for other in (yield from gathered(payload)):
            their_indices, values = unpack(other, (kept, INDEX_DTYPE), (kept, gradient.dtype))
            total[their_indices] += values
        return total

    def kept(self, elements: int) -> int:
        """Return the number of entries that are sent: at least one unless the gradient is empty."""
        if elements > MAX_ELEMENTS:
            raise ConfigError([f"codec topk: supports at most {MAX_ELEMENTS} elements"])
        return min(elements, max(1, round(self.ratio * elements)))

    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        return WireBytes(gathers=(self.kept(elements) * (INDEX_DTYPE.itemsize + element_bytes),))

    def rescale(self, factor: float) -> None:
        self._feedback.rescale(factor)

    def state_dict(self) -> State:
        return {"pending": self._feedback.state()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._feedback.load(state["pending"])
