"""Losses that are read back together, as soon as the GPU has computed them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LossBlock:
    """The losses of several steps; neither a step nor the GPU waits for them to be read."""

    def __init__(self, losses: Sequence[Tensor]) -> None:
        self._losses = torch.stack(list(losses)) if losses else None
        self._copied: torch.cuda.Event | None = None
        if self._losses is not None and self._losses.is_cuda:
            # A copy to pinned memory, unlike others, does not wait for the GPU.
            pinned = torch.empty(self._losses.shape, dtype=self._losses.dtype, pin_memory=True)
            self._losses = pinned.copy_(self._losses, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_ready(self) -> bool:
        return self._copied is None or self._copied.query()

    def values(self) -> list[float]:
        """Wait for the GPU if necessary."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = [] if self._losses is None else self._losses.tolist()
        return values
