"""Optimizer state in parts and as a whole: how checkpoints come to fit any number of workers.

A state holds tensors as large as the weight, and scalars such as the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_bytes, gather_json

KIND = "parameters"

SCALARS = ("step", "eta", "mu", "mu_product")
"""What torch's optimizers keep once for a whole weight."""


@dataclass(frozen=True, slots=True)
class PieceState:
    """Of some neighbouring elements of a weight."""

    weight: int
    begin: int
    """The first element, in the order of the weight's memory."""
    values: dict[str, Any]
    """What the optimizer keeps; tensors of elements are flat."""


def gather(
    communicator: Communicator, weights: Sequence[nn.Parameter], pieces: Sequence[PieceState]
) -> dict[int, dict[str, Any]]:
    """The state of each weight, by its number, on rank 0; elsewhere nothing. Collective."""
    tables = gather_json(communicator, [_describe(piece) for piece in pieces])
    payloads = gather_bytes(communicator, _pack(pieces), KIND)
    whole: dict[int, dict[str, Any]] = {}
    for table, payload in zip(tables or [], payloads or [], strict=True):
        position = 0
        for piece in table:
            state = whole.setdefault(piece["weight"], {}) if piece["order"] else {}
            weight = weights[piece["weight"]]
            for name in piece["order"]:
                if name in piece["scalars"]:
                    state[name] = _scalar(piece["scalars"][name])
                    continue
                dtype_name, elements = piece["tensors"][name]
                dtype = getattr(torch, dtype_name)
                size = elements * dtype.itemsize
                part = payload[position : position + size].clone().view(dtype)
                position += size
                if name not in state:
                    state[name] = _memory_of(weight, dtype)
                _flat(state[name])[piece["begin"] : piece["begin"] + elements] = part
    return whole


def cut(state: dict[str, Any], weight: nn.Parameter, part: slice) -> dict[str, Any]:
    """What belongs to some elements of a weight, those of `part` in the order of its memory."""
    values: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            values[name] = value
        elif name in SCALARS:
            values[name] = value.clone()
        elif value.shape != weight.shape:
            raise ValueError(f"{name} has shape {value.shape}, its weight {weight.shape}")
        else:
            ordered = _memory_of(weight, value.dtype).copy_(value)
            values[name] = _flat(ordered)[part].clone()
    return values


def _describe(piece: PieceState) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in piece.values.items():
        if not isinstance(value, Tensor):
            scalars[name] = [None, value]
        elif value.dim() == 0:
            scalars[name] = [_dtype_name(value), value.item()]
        else:
            tensors[name] = [_dtype_name(value), value.numel()]
    return {
        "weight": piece.weight,
        "begin": piece.begin,
        "order": list(piece.values),
        "scalars": scalars,
        "tensors": tensors,
    }


def _pack(pieces: Sequence[PieceState]) -> Tensor:
    tensors = [
        value.detach().cpu().view(torch.uint8)
        for piece in pieces
        for value in piece.values.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *tensors])


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _scalar(described: list[Any]) -> Any:
    dtype_name, value = described
    return value if dtype_name is None else torch.tensor(value, dtype=getattr(torch, dtype_name))


def _memory_of(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """In main memory, with the shape and strides of a weight."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype)


def _flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
