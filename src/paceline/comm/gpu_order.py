"""The order of work on a GPU when one thread submits it and another carries it out.

Each thread gives its work to a stream of its own, and streams run independently of one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class DeviceOrder(Protocol):
    def mark(self) -> object:
        """The work that the calling thread has given to the device so far."""

    def behind(self, mark: object) -> AbstractContextManager[None]:
        """Start the block's work after the marked work, and leave the block when it is done."""


class GpuOrder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def behind(self, mark: object) -> Iterator[None]:
        assert isinstance(mark, torch.cuda.Event)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()


def order_on(device: torch.device) -> DeviceOrder | None:
    """None where work is done when its call returns, as on a CPU."""
    return GpuOrder(device) if device.type == "cuda" else None
