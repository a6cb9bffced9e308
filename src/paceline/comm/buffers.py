"""A flat tensor cut into as many chunks as there are ranks, which differ by at most one element.

Where the elements do not divide evenly, the first chunks are the larger ones; where there are fewer
elements than ranks, the last chunks are empty.

Flat, contiguous stand-ins for callers' tensors, which have any strides and any device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk_begin(elements: int, chunks: int, index: int) -> int:
    """The first element of a chunk; that of chunk number `chunks` is the end."""
    small, larger = divmod(elements, chunks)
    return index * small + min(index, larger)


def chunk_elements(elements: int, chunks: int, index: int) -> int:
    """How many elements a chunk has; indices wrap around, as ranks on a ring do."""
    small, larger = divmod(elements, chunks)
    return small + (index % chunks < larger)


def chunk(flat: Tensor, chunks: int, index: int, count: int = 1) -> Tensor:
    """A view of `count` neighbouring chunks from `index` on."""
    elements = flat.numel()
    return flat[chunk_begin(elements, chunks, index) : chunk_begin(elements, chunks, index + count)]


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    flat: Tensor
    """One dimension, contiguous, on the device asked for; the tensor's memory where possible."""
    original: Tensor
    is_copy: bool

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> StagingBuffer:
        """Stand in for a tensor whose values are needed."""
        original = tensor.detach()
        placed = original.to(device or tensor.device).contiguous()
        return cls(placed.view(-1), original, is_copy=placed.data_ptr() != original.data_ptr())

    @classmethod
    def to_fill(cls, tensor: Tensor, device: torch.device | None = None) -> StagingBuffer:
        """Stand in for a tensor that will be overwritten, whose values need not be copied."""
        original = tensor.detach()
        device = device or original.device
        if original.is_contiguous() and original.device == device:
            return cls(original.view(-1), original, is_copy=False)
        flat = torch.empty(original.numel(), dtype=original.dtype, device=device)
        return cls(flat, original, is_copy=True)

    def copy_back(self) -> None:
        """Write the result to where the caller wants it."""
        if self.is_copy:
            self.original.copy_(self.flat.view(self.original.shape))


def memcpy(target: Tensor, source: Tensor) -> None:
    """Copy between contiguous tensors in main memory, as many bytes as both have.

    The C library does that in a third to a half less time than `Tensor.copy_` (docs/log.md).
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), min(target.nbytes, source.nbytes))
