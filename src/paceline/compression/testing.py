"""Run the exchange of all ranks in one thread, for tests and debugging of codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Exchange, Gather, Shapes, Sum, WireBytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one exchange."""

    results: list[Tensor]
    """Result of each worker by rank."""
    wire_bytes: WireBytes
    """Measured bytes that each worker contributed."""


def exchange_all_ranks(
    codecs: Sequence[Codec], key: str, gradients: Sequence[Tensor], shapes: Shapes = ()
) -> Outcome:
    """Run one exchange; each rank has its own codec and gradient."""
    exchanges = [
        codec.exchange(key, gradient, shapes)
        for codec, gradient in zip(codecs, gradients, strict=True)
    ]
    sums: list[int] = []
    gathers: list[int] = []
    steps = [_advance(exchange, None) for exchange in exchanges]
    while not all(isinstance(step, Tensor) for step in steps):
        tensors = [step.tensor for step in steps if isinstance(step, Sum | Gather)]
        kinds = {(type(step), step.tensor.shape) for step in steps if not isinstance(step, Tensor)}
        if len(tensors) != len(steps) or len(kinds) != 1:
            raise RuntimeError(f"workers made different requests: {kinds}")
        stacked = torch.stack(tensors)
        replies: list[Tensor | list[Tensor]]
        if isinstance(steps[0], Sum):
            sums.append(tensors[0].nbytes)
            replies = [_sum_in_rank_order(stacked) for _ in steps]
        else:
            gathers.append(tensors[0].nbytes)
            replies = [list(stacked.unbind()) for _ in steps]
        steps = [
            _advance(exchange, reply) for exchange, reply in zip(exchanges, replies, strict=True)
        ]
    results = [step for step in steps if isinstance(step, Tensor)]
    return Outcome(results, WireBytes(tuple(sums), tuple(gathers)))


def _advance(
    exchange: Exchange[Tensor], reply: Tensor | list[Tensor] | None
) -> Sum | Gather | Tensor:
    """Return the next request, or the result if there are no more requests."""
    try:
        return next(exchange) if reply is None else exchange.send(reply)
    except StopIteration as end:
        result: Tensor = end.value
        return result


def _sum_in_rank_order(stacked: Tensor) -> Tensor:
    """Sum in the dtype of the tensors, with its rounding and range, as a communicator does."""
    total = stacked[0].clone()
    for other in stacked[1:]:
        total += other
    return total
