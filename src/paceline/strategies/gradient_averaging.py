"""Summing gradients over the workers: how (an algorithm) and in what form (a codec).

Averaging gradients before every update, the plainest way of keeping replicas equal.

Three independent choices: when (after the backward pass, tensor by tensor or all at once; or in
buckets during it: overlap.py), how (an all-reduce algorithm of comm/algorithms) and in what form (a
codec). All workers start from the first one's weights and add the same sum, so they stay equal bit
for bit, though each computed a part of the gradient only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm import ALGORITHMS
from paceline.comm.algorithms.ring import Library
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.comm.work import CompletedWork, Work
from paceline.compression import create as create_codec
from paceline.compression import option_names
from paceline.compression.codec import Shapes, State, drive
from paceline.errors import ConfigError
from paceline.measure.timeline import Moment, Timeline
from paceline.strategies.flat_buffer import FlatGradients
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape, Strategy

KIND = "gradients"


class GradientReducer:
    """Replaces gradients by their sum over all workers."""

    def __init__(self, algorithm: str, codec: str, codec_options: dict[str, str]) -> None:
        self.algorithm = ALGORITHMS.load(algorithm)()
        self.codec = None if codec == "none" else create_codec(codec, codec_options)
        self.returns_at_once = self.codec is None and isinstance(self.algorithm, Library)
        """Whether `begin` leaves the work to the library, which needs no thread of ours for it."""

    def begin(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> Work:
        """Like `sum`, but the sum is there only after `wait()`. Collective."""
        if self.returns_at_once:
            return communicator.all_reduce(gradient, KIND)
        self.sum(communicator, key, gradient, shapes)
        return CompletedWork()

    def sum(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> None:
        """In place, over a flat contiguous gradient; blocks until the sum is there. Collective.

        `key` names the gradient in every step; `shapes` are those of the tensors within it.
        """
        if communicator.world_size == 1:
            return
        if self.codec is None:
            self.algorithm.all_reduce(communicator, gradient, KIND)
            return
        total = drive(
            self.codec.exchange(key, gradient, shapes),
            lambda payload: self._summed(communicator, payload),
            lambda payload: gathered(communicator, payload),
        )
        if total is not gradient:
            gradient.copy_(total)

    def _summed(self, communicator: Communicator, payload: Tensor) -> Tensor:
        self.algorithm.all_reduce(communicator, payload, KIND)
        return payload


def gathered(communicator: Communicator, payload: Tensor) -> list[Tensor]:
    """Every worker's payload, in the ranks' order."""
    size = payload.numel()
    everything = torch.empty(size * communicator.world_size, dtype=payload.dtype)
    everything = everything.to(payload.device)
    everything[communicator.rank * size :][:size] = payload
    communicator.all_gather(everything, KIND).wait()
    return list(everything.split(size)) if size else [payload] * communicator.world_size


@dataclass(slots=True)
class Exchange:
    """One that is under way: from when its gradient was ready to when its sum was there."""

    began: Moment
    ended: Moment | None = None


class Underway:
    """The exchanges of a step, which may overlap; they may end on any thread."""

    def __init__(self, timeline: Timeline) -> None:
        """`timeline`: of the device that computes the gradients."""
        self._timeline = timeline
        self._exchanges: list[Exchange] = []

    def begin(self) -> Exchange:
        """An exchange of what the current stream computes; its `ended` has to be set."""
        exchange = Exchange(self._timeline.mark())
        self._exchanges.append(exchange)
        return exchange

    def take(self) -> list[Exchange]:
        """Those since the last time asked."""
        exchanges, self._exchanges = self._exchanges, []
        return exchanges

    def spans(self, exchanges: Sequence[Exchange]) -> list[tuple[float, float]]:
        """When they began and ended, in seconds of `perf_counter`; waits until they are over."""
        seconds = self._timeline.seconds
        spans = []
        for exchange in exchanges:
            assert exchange.ended is not None, "the exchange is still under way"
            spans.append((seconds(exchange.began), seconds(exchange.ended)))
        return spans


def seconds_under_way(spans: Iterable[tuple[float, float]], until: float = math.inf) -> float:
    """How long at least one exchange was under way, up to a moment."""
    total, last = 0.0, -math.inf
    for began, ended in sorted(spans):
        end = min(ended, until)
        total += max(0.0, end - max(began, last))
        last = max(last, end)
    return total


class GradientAveraging(Strategy):
    """After the backward pass: one all-reduce for each tensor, or with `flat` one for all."""

    def __init__(
        self,
        *,
        algorithm: str = "library",
        flat: bool = False,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        """`chunk`, `ratio` and `rank` are options of the codecs int8, topk and powersgd."""
        self.flat = flat
        self._loss_scale: float | None = None
        """By which the gradients of the last pass were multiplied; None: there was none yet."""
        self._codec_before: State | None = None
        """What the codec remembered before the last step; only where a step may be skipped."""
        given = {"chunk": chunk, "ratio": ratio, "rank": rank}
        self.exchange = GradientReducer(algorithm, codec, codec_options(codec, given))

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        summed_by = replica.communicator if self.exchange.returns_at_once else None
        self._gradients = FlatGradients(replica.trainable, summed_by)
        replica.flat_gradients = self._gradients.tensor

    def backward(self, loss: Tensor) -> None:
        self._follow_loss_scale()
        codec = self.exchange.codec
        if (
            codec is not None
            and self.replica.scaler.is_enabled()
            and self.replica.is_last_microbatch
        ):
            # No gradient of this step has been through the codec yet.
            self._codec_before = codec.state_dict()
        super().backward(loss)

    def step(self) -> None:
        with self.replica.exposed_communication():
            self._synchronize()
        self.replica.update()

    def _synchronize(self) -> None:
        communicator, gradients = self.replica.communicator, self._gradients
        if self.flat:
            self.exchange.sum(communicator, "all", gradients.tensor, gradients.shapes)
            return
        under_way = [
            self.exchange.begin(communicator, str(number), part, [shape])
            for number, (part, shape) in enumerate(
                zip(gradients.parts, gradients.shapes, strict=True)
            )
        ]
        for work in under_way:
            work.wait()

    def _follow_loss_scale(self) -> None:
        """What a codec holds back must grow and shrink with the gradients that it is added to.

        The scale shrinks only when the scaler has skipped a step. Nothing of that step was applied,
        so the codec must not remember it: neither that it sent a part, nor the rest.
        """
        codec = self.exchange.codec
        if codec is None:
            return
        scale = self.replica.scaler.get_scale()
        if self._loss_scale is not None and scale != self._loss_scale:
            if scale < self._loss_scale and self._codec_before is not None:
                codec.load_state_dict(self._codec_before)
            codec.rescale(scale / self._loss_scale)
        self._loss_scale, self._codec_before = scale, None

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        sizes = (shape.gradient_bytes,) if self.flat else shape.tensor_bytes
        costs = [self.exchange.algorithm.cost(shape.workers, size, network) for size in sizes]
        return Cost(
            seconds=sum(cost.seconds for cost in costs),
            bytes_sent=sum(cost.bytes_sent for cost in costs),
            messages=sum(cost.messages for cost in costs),
        )

    def state_dict(self) -> dict[str, Any]:
        self._follow_loss_scale()
        codec = self.exchange.codec
        return {"codec": codec.state_dict()} if codec else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.exchange.codec:
            self.exchange.codec.load_state_dict(state["codec"])
            self._loss_scale = self._codec_before = None


def codec_options(codec: str, given: dict[str, str | None]) -> dict[str, str]:
    """Those of the options that were given; refused where the codec has no such option."""
    known = option_names(codec)
    problems = [
        f"-o {name}: codec {codec} has no such option"
        for name, value in given.items()
        if value is not None and name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return {name: value for name, value in given.items() if value is not None}
