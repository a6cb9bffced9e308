"""Messages between a worker and a server (comm/connection.py): one request, one reply.

A gradient or weights are the payload of a message, or in memory that both processes share
(memory.py); then the message has no payload and tells the peer that they are there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import IntEnum

import torch
from torch import Tensor

from paceline.comm.connection import bytes_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Supported dtypes of weights; messages contain the index."""

State = dict[str, Tensor | float | None]
"""Optimizer state of one flat tensor: tensors of its shape, scalars, or None."""

TENSOR = "tensor"
"""Placeholder for a tensor in the description of a state."""

ALIGN_BYTES = 64

CLIP_EPSILON = 1e-6
"""The epsilon of torch.nn.utils.clip_grad_norm_."""


class Request(IntEnum):
    """Code of a worker's message (numbers and payload -> reply)."""

    ATTACH = 1
    """(elements of the model, begin and end of the shard, index in `DTYPES`), name of the worker's
    shared memory or nothing -> (whether the server shares it)."""
    BEGIN = 2
    """(elements with weight decay, which come first), initial weights -> acknowledgment."""
    STEP = 3
    """(learning rate, norm to clip by or 0, whether to measure), gradient -> (sum of squares of the
    total gradient, if measured), new weights, after all workers' requests."""
    SUM = 4
    """Gradient -> (sum of squares of the total gradient), after all workers' requests."""
    APPLY = 5
    """(learning rate, factor), after SUM -> new weights."""
    PUSH = 6
    """(learning rate), gradient -> (updates since the last pull). On server 0, also DONE."""
    PULL = 7
    """-> weights."""
    PUSH_PULL = 8
    """PUSH and PULL: (learning rate), gradient -> (updates since the last pull), weights."""
    ASSIGN = 9
    """(first, total, checkpoint_every, stop, finish) -> (0, action, iteration, part, ahead, seconds
    waited), weights."""
    PUSH_ASSIGN = 10
    """PUSH and ASSIGN: (first, total, checkpoint_every, stop, finish, learning rate), gradient ->
    (updates since the last pull, action, iteration, part, ahead, seconds waited), weights."""
    DONE = 11
    """All servers have applied the update of the worker's assignment. No reply."""
    SAVE = 12
    """-> optimizer state (`pack_state`)."""
    LOAD = 13
    """(length of the description), optimizer state -> acknowledgment."""
    BARRIER = 14
    """-> acknowledgment, after all workers' requests."""
    FINISHED = 15
    """The worker will disconnect, which is not a failure. No reply."""


def clip_factor(squares: float, clip_norm: float) -> float:
    """Return the factor that clips gradients with this sum of squares."""
    return min(1.0, clip_norm / (math.sqrt(squares) + CLIP_EPSILON))


def pack_state(state: Mapping[str, Tensor | float | None]) -> tuple[int, list[memoryview]]:
    """Return the payload of a state, and the length of its description.

    The description is JSON, padded so that the tensors that follow are aligned.
    """
    description = json.dumps(
        {name: TENSOR if isinstance(value, Tensor) else value for name, value in state.items()}
    ).encode()
    padded = description.ljust(-(-len(description) // ALIGN_BYTES) * ALIGN_BYTES)
    tensors = [bytes_of(value) for value in state.values() if isinstance(value, Tensor)]
    return len(padded), [memoryview(padded), *tensors]


def unpack_state(payload: bytearray, description_bytes: int, like: Tensor) -> State:
    """Return the state of a payload; its tensors have the shape and dtype of `like`."""
    state: State = {}
    begin = description_bytes
    for name, value in json.loads(payload[:description_bytes]).items():
        state[name] = value
        if value == TENSOR:
            state[name] = tensor = torch.empty_like(like, device="cpu")
            bytes_of(tensor)[:] = memoryview(payload)[begin : begin + tensor.nbytes]
            begin += tensor.nbytes
    return state
