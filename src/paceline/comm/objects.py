"""Collectives for JSON values, bytes and scalars.

They never use pickle, so received data cannot execute code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator


def broadcast_json(communicator: Communicator, value: Any, root: int = 0) -> Any:
    """Return the root's value on all ranks. Collective."""
    if communicator.world_size == 1:
        return value
    payload = _encode(value) if communicator.rank == root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([payload.numel()])
    communicator.broadcast(size, root, "control").wait()
    if communicator.rank != root:
        payload = torch.empty(int(size), dtype=torch.uint8)
    communicator.broadcast(payload, root, "control").wait()
    return _decode(payload)


def gather_json(communicator: Communicator, value: Any) -> list[Any] | None:
    """Return the values of all ranks, by rank, on rank 0; None on other ranks. Collective."""
    payloads = gather_bytes(communicator, _encode(value), "control")
    return None if payloads is None else [_decode(payload) for payload in payloads]


def first_value(communicator: Communicator, value: Any) -> Any:
    """Return the value of the first rank whose value is not None, on all ranks. Collective."""
    values = gather_json(communicator, value)
    return broadcast_json(communicator, next((each for each in values or [] if each), None))


def gather_bytes(communicator: Communicator, payload: Tensor, kind: str) -> list[Tensor] | None:
    """Return the bytes of all ranks, by rank, on rank 0; None on other ranks. Collective.

    Payloads may have different sizes.
    """
    if communicator.world_size == 1:
        return [payload]
    sizes = all_gather_scalars(communicator, torch.tensor(payload.numel()), kind)
    if communicator.rank:
        communicator.send(payload, 0, kind).wait()
        return None
    payloads = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    payloads[0] = payload
    for rank in communicator.peers:
        communicator.recv(payloads[rank], rank, kind).wait()
    return payloads


def all_gather_scalars(communicator: Communicator, values: Tensor, kind: str = "control") -> Tensor:
    """Return the values of all ranks, one row per rank, on all ranks. Collective.

    Implemented as an all_reduce of a table in which each rank fills its own row; adding zeros is
    exact.
    """
    table = values.new_zeros((communicator.world_size, *values.shape))
    table[communicator.rank] = values
    communicator.all_reduce(table, kind).wait()
    return table


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(payload: Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
