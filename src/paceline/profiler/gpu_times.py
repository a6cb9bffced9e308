"""When the GPU executes what a program launches: intervals between CUDA events."""

from __future__ import annotations

from typing import Any

import torch


class GpuInterval:
    """From its creation to `end` in the work of the current stream."""

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()
        self._ended: Any = None

    def end(self) -> None:
        self._ended = torch.cuda.Event(enable_timing=True)
        self._ended.record()

    def is_completed(self) -> bool:
        return self._ended is not None and self._ended.query()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1000
