"""When the GPU executes what a program launches: intervals between CUDA events."""

from __future__ import annotations

from typing import Any

import torch


class GpuInterval:
    """From its creation to `end` in the work of a device's current stream."""

    __slots__ = ("_began", "_ended", "_stream")

    def __init__(self, device: Any = None) -> None:
        """`device`: as torch.cuda.current_stream takes it."""
        self._stream = torch.cuda.current_stream(device)
        self._began = self._stream.record_event(torch.cuda.Event(enable_timing=True))
        self._ended: Any = None

    def end(self) -> None:
        self._ended = self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def is_completed(self) -> bool:
        return self._ended is not None and self._ended.query()

    def seconds(self) -> float:
        return float(self._began.elapsed_time(self._ended)) / 1000
