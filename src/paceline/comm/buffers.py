"""Flat buffers: chunk bounds, contiguous staging copies, memcpy.

Collectives split a flat tensor into one chunk per rank. Chunk sizes differ by at most one element:
the first chunks are larger if the elements do not divide evenly, and the last chunks are empty if
there are fewer elements than ranks.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


def chunk_begin(elements: int, chunks: int, index: int) -> int:
    """Return the first element of a chunk; for `index == chunks`, the number of elements."""
    small, larger = divmod(elements, chunks)
    return index * small + min(index, larger)


def chunk_elements(elements: int, chunks: int, index: int) -> int:
    """Return the number of elements of a chunk; indices wrap around, like ranks on a ring."""
    small, larger = divmod(elements, chunks)
    return small + (index % chunks < larger)


def chunk(flat: Tensor, chunks: int, index: int, count: int = 1) -> Tensor:
    """Return a view of `count` adjacent chunks, starting at `index`."""
    elements = flat.numel()
    return flat[chunk_begin(elements, chunks, index) : chunk_begin(elements, chunks, index + count)]


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """A flat, contiguous version of a tensor with any strides, on any device."""

    flat: Tensor
    """Shares memory with the original if the original is contiguous and on the requested device."""
    original: Tensor
    is_copy: bool

    @classmethod
    def from_tensor(cls, tensor: Tensor, device: torch.device | None = None) -> StagingBuffer:
        """Stage a tensor, including its values."""
        original = tensor.detach()
        staged = original.to(device or tensor.device).contiguous()
        return cls(staged.view(-1), original, is_copy=staged.data_ptr() != original.data_ptr())

    @classmethod
    def empty_like(cls, tensor: Tensor, device: torch.device | None = None) -> StagingBuffer:
        """Stage a tensor that will be overwritten, without copying its values."""
        original = tensor.detach()
        device = device or original.device
        if original.is_contiguous() and original.device == device:
            return cls(original.view(-1), original, is_copy=False)
        flat = torch.empty(original.numel(), dtype=original.dtype, device=device)
        return cls(flat, original, is_copy=True)

    def copy_back(self) -> None:
        """Copy the result to the original tensor if `flat` is a copy."""
        if self.is_copy:
            self.original.copy_(self.flat.view(self.original.shape))


def memcpy(target: Tensor, source: Tensor) -> None:
    """Copy between contiguous CPU tensors, up to the size of the smaller one.

    `memmove` takes 33% to 50% less time than `Tensor.copy_` (docs/design-notes.md).
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), min(target.nbytes, source.nbytes))
