"""Model and optimizer state in checkpoints, in the layout of a single process.

A checkpoint can therefore be resumed with another strategy or number of workers. `gather_shards`
and `extract_shard` convert between the state of a whole optimizer and the state of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_bytes, gather_json
from paceline.strategies.replica import Replica

KIND = "parameters"


class CheckpointState:
    """State of replicas that are equal on all ranks; strategies with other layouts subclass it."""

    has_full_weights: bool = True
    """Whether `replica.model` currently holds all of its weights."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def model_state_dict(self) -> dict[str, Any]:
        """Return the weights and buffers of the whole model. Collective."""
        return self.replica.model.state_dict()

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        """Load a model state of any strategy. All ranks must pass the same state."""
        self.replica.model.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; only rank 0's is complete. Collective."""
        return self.replica.optimizer.state_dict()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load rank 0's optimizer state of any strategy. All ranks must pass the same state."""
        self.replica.optimizer.load_state_dict(state)


SCALARS = ("step", "eta", "mu", "mu_product")
"""Optimizer state that exists once per weight rather than per element."""


@dataclass(frozen=True, slots=True)
class ShardState:
    """Optimizer state of contiguous elements of one weight."""

    weight: int
    begin: int
    """Index of the first element, in memory order."""
    values: dict[str, Any]
    """Values by their names in the optimizer; per-element tensors are flat."""


def gather_shards(
    communicator: Communicator, weights: Sequence[nn.Parameter], shards: Sequence[ShardState]
) -> dict[int, dict[str, Any]]:
    """Return the state of each weight by index on rank 0, an empty dict elsewhere. Collective."""
    tables = gather_json(communicator, [_describe(shard) for shard in shards])
    payloads = gather_bytes(communicator, _pack(shards), KIND)
    whole: dict[int, dict[str, Any]] = {}
    for table, payload in zip(tables or [], payloads or [], strict=True):
        position = 0
        for shard in table:
            state = whole.setdefault(shard["weight"], {}) if shard["order"] else {}
            weight = weights[shard["weight"]]
            for name in shard["order"]:
                if name in shard["scalars"]:
                    state[name] = _scalar(shard["scalars"][name])
                    continue
                dtype_name, count = shard["tensors"][name]
                dtype = getattr(torch, dtype_name)
                size_bytes = count * dtype.itemsize
                values = payload[position : position + size_bytes].clone().view(dtype)
                position += size_bytes
                if name not in state:
                    state[name] = _empty_like(weight, dtype)
                _flat(state[name])[shard["begin"] : shard["begin"] + count] = values
    return whole


def extract_shard(state: dict[str, Any], weight: nn.Parameter, elements: slice) -> dict[str, Any]:
    """Return the state of a range of a weight's elements, in memory order."""
    values: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            values[name] = value
        elif name in SCALARS:
            values[name] = value.clone()
        elif value.shape != weight.shape:
            raise ValueError(f"{name} has shape {value.shape}, but its weight has {weight.shape}")
        else:
            ordered = _empty_like(weight, value.dtype).copy_(value)
            values[name] = _flat(ordered)[elements].clone()
    return values


def _describe(shard: ShardState) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for name, value in shard.values.items():
        if not isinstance(value, Tensor):
            scalars[name] = [None, value]
        elif value.dim() == 0:
            scalars[name] = [_dtype_name(value), value.item()]
        else:
            tensors[name] = [_dtype_name(value), value.numel()]
    return {
        "weight": shard.weight,
        "begin": shard.begin,
        "order": list(shard.values),
        "scalars": scalars,
        "tensors": tensors,
    }


def _pack(shards: Sequence[ShardState]) -> Tensor:
    tensors = [
        value.detach().cpu().view(torch.uint8)
        for shard in shards
        for value in shard.values.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return torch.cat([torch.empty(0, dtype=torch.uint8), *tensors])


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _scalar(described: list[Any]) -> Any:
    dtype_name, value = described
    return value if dtype_name is None else torch.tensor(value, dtype=getattr(torch, dtype_name))


def _empty_like(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized CPU tensor with the shape and strides of a weight."""
    return torch.empty_strided(weight.shape, weight.stride(), dtype=dtype)


def _flat(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
