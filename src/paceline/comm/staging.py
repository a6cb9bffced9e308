"""Flat, contiguous stand-ins for callers' tensors, which have any strides and any device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Staged:
    flat: Tensor
    """One dimension, contiguous, on the device asked for; the tensor's memory where possible."""
    original: Tensor
    is_copy: bool

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device | None = None) -> Staged:
        """Stand in for a tensor whose values are needed."""
        original = tensor.detach()
        placed = original.to(device or tensor.device).contiguous()
        return cls(placed.view(-1), original, is_copy=placed.data_ptr() != original.data_ptr())

    @classmethod
    def to_fill(cls, tensor: Tensor, device: torch.device | None = None) -> Staged:
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


def copy_flat(target: Tensor, source: Tensor) -> None:
    """Copy between contiguous tensors in main memory, as many bytes as both have.

    The C library does that in a third to a half less time than `Tensor.copy_` (docs/log.md).
    """
    ctypes.memmove(target.data_ptr(), source.data_ptr(), min(target.nbytes, source.nbytes))
