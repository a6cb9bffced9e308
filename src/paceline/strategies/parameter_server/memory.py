"""The gradients and weights of one worker, in memory that servers on its node share.

A server reads the gradient there, and writes new weights there while the worker waits for its
reply, so that nothing is copied on the way. Messages on the connection tell each side when to look;
their system calls also order the memory accesses. The worker creates the memory and unlinks its
file once all servers have mapped it. Between nodes, and without enough space in /dev/shm, messages
carry the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Self

import torch
from torch import Tensor

from paceline.comm.shm import segment
from paceline.comm.shm.segment import aligned_offsets


class WorkerMemory:
    """Flat gradients and weights of a worker, or a server's shard of them."""

    def __init__(self, gradients: Tensor, weights: Tensor) -> None:
        self.gradients, self.weights = gradients, weights

    @classmethod
    def private(cls, elements: int, dtype: torch.dtype) -> Self:
        return cls(torch.zeros(elements, dtype=dtype), torch.zeros(elements, dtype=dtype))

    @classmethod
    @contextmanager
    def allocate(
        cls, elements: int, dtype: torch.dtype, is_shared: bool
    ) -> Iterator[tuple[Self, str]]:
        """Allocate memory that servers can `attach` by its name within the block.

        It is private, and its name is empty, unless `is_shared` and there is enough shared memory.
        """
        size_bytes = _layout(elements, dtype)[1]
        try:
            path = segment.create_file(size_bytes) if is_shared else None
        except OSError:
            path = None
        if path is None:
            yield cls.private(elements, dtype), ""
            return
        try:
            yield cls._view(segment.map_file(path, size_bytes), elements, dtype), path.name
        finally:
            path.unlink()

    @classmethod
    def attach(cls, name: str, elements: int, dtype: torch.dtype) -> Self | None:
        """Map the memory of a worker; None if it is not accessible here."""
        if not name.startswith(segment.PREFIX) or "/" in name:
            return None
        try:
            mapped = segment.map_file(segment.FOLDER / name, _layout(elements, dtype)[1])
        except (OSError, ValueError):
            return None
        return cls._view(mapped, elements, dtype)

    @classmethod
    def _view(cls, mapped: mmap, elements: int, dtype: torch.dtype) -> Self:
        begins, _ = _layout(elements, dtype)
        return cls(*(_tensor(mapped, begin, elements, dtype) for begin in begins))

    def shard(self, begin: int, end: int) -> Self:
        return type(self)(self.gradients[begin:end], self.weights[begin:end])


def _layout(elements: int, dtype: torch.dtype) -> tuple[list[int], int]:
    """Return the offsets of gradients and weights, and the total size, in bytes."""
    begins, end = aligned_offsets([elements * dtype.itemsize] * 2)
    return begins, max(end, 1)


def _tensor(mapped: mmap, begin: int, elements: int, dtype: torch.dtype) -> Tensor:
    if not elements:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=elements, offset=begin)
