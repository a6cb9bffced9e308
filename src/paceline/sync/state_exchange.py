"""Model state between workers: the same beginning for all, and agreed batch-norm statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator


def broadcast_model(model: nn.Module, communicator: Communicator) -> None:
    """Give every worker the first one's weights and buffers."""
    if communicator.world_size > 1:
        _broadcast([weight.data for weight in model.parameters()], communicator, "parameters")
        _broadcast(list(model.buffers()), communicator, "buffers")


def agree_on_buffers(model: nn.Module, communicator: Communicator, how: str) -> None:
    """Batch-norm statistics for evaluation: the first worker's (`rank0`) or all of them's mean.

    Each worker sees other samples, so their running statistics differ though their weights do not.
    Counters are always the first worker's.
    """
    buffers = list(model.buffers())
    if communicator.world_size == 1 or not buffers:
        return
    if how == "rank0":
        _broadcast(buffers, communicator, "buffers")
        return
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    if floating:
        flat = torch.cat([buffer.flatten() for buffer in floating])
        communicator.all_reduce(flat, "buffers").wait()
        _copy_back(flat / communicator.world_size, floating)
    _broadcast([each for each in buffers if not each.is_floating_point()], communicator, "buffers")


def _broadcast(tensors: list[Tensor], communicator: Communicator, kind: str) -> None:
    """One message for each type of element, not one for each tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.flatten() for tensor in alike])
        communicator.broadcast(flat, 0, kind).wait()
        _copy_back(flat, alike)


def _copy_back(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
