"""A team of workers played through in one thread: for tests, and for looking closely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.compression.codec import Codec, Exchange, Gather, Shapes, Sum, WireBytes


@dataclass(frozen=True, slots=True)
class Outcome:
    results: list[Tensor]
    """What each worker ended with, by rank."""
    wire_bytes: WireBytes
    """What each worker handed over, as counted on the way."""


def exchange_all_ranks(
    codecs: Sequence[Codec], key: str, gradients: Sequence[Tensor], shapes: Shapes = ()
) -> Outcome:
    """One exchange among as many workers as there are codecs, each with its gradient."""
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
            raise RuntimeError(f"the workers ask for different things: {kinds}")
        stacked = torch.stack(tensors)
        answers: list[Tensor | list[Tensor]]
        if isinstance(steps[0], Sum):
            sums.append(tensors[0].nbytes)
            answers = [_sum_in_rank_order(stacked) for _ in steps]
        else:
            gathers.append(tensors[0].nbytes)
            answers = [list(stacked.unbind()) for _ in steps]
        steps = [
            _advance(exchange, answer) for exchange, answer in zip(exchanges, answers, strict=True)
        ]
    results = [step for step in steps if isinstance(step, Tensor)]
    return Outcome(results, WireBytes(tuple(sums), tuple(gathers)))


def _advance(
    exchange: Exchange[Tensor], answer: Tensor | list[Tensor] | None
) -> Sum | Gather | Tensor:
    """The next request, or the result once there are no more."""
    try:
        return next(exchange) if answer is None else exchange.send(answer)
    except StopIteration as end:
        result: Tensor = end.value
        return result


def _sum_in_rank_order(stacked: Tensor) -> Tensor:
    """In the tensors' own type, with its rounding and its range, as on the wire."""
    total = stacked[0].clone()
    for other in stacked[1:]:
        total += other
    return total
