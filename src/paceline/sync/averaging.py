"""Averaging gradients before every update, the plainest way of keeping replicas equal.

Three independent choices: when (after the backward pass, tensor by tensor or all at once; or in
buckets during it: overlap.py), how (an all-reduce algorithm of comm/algorithms) and in what form (a
codec). All workers start from the first one's weights and add the same sum, so they stay equal bit
for bit, though each computed a part of the gradient only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.comm.cost import Cost, Network
from paceline.compression import option_names
from paceline.compression.codec import State
from paceline.errors import ConfigError
from paceline.sync.exchange import GradientExchange
from paceline.sync.flat import FlatGradients
from paceline.sync.replica import Replica
from paceline.sync.state_exchange import broadcast_model
from paceline.sync.strategy import ModelShape, Strategy


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
        self.exchange = GradientExchange(algorithm, codec, codec_options(codec, given))

    def attach(self, replica: Replica) -> None:
        super().attach(replica)
        broadcast_model(replica.model, replica.communicator)
        summed_by = replica.communicator if self.exchange.returns_at_once else None
        self._gradients = FlatGradients(replica.trainable, summed_by)
        replica.flat_gradients = self._gradients.tensor

    def backward(self, loss: Tensor) -> None:
        self._follow_loss_scale()
        codec = self.exchange.codec
        if codec is not None and self.replica.scaler.is_enabled() and self.replica.last_part:
            # No gradient of this step has been through the codec yet.
            self._codec_before = codec.state_dict()
        super().backward(loss)

    def step(self) -> None:
        with self.replica.exchanging():
            self._synchronise()
        self.replica.update()

    def _synchronise(self) -> None:
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
