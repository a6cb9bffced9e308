"""Gradient averaging: all-reduce the gradients before every update.

Three settings are independent: when to communicate (after the backward pass, per tensor or flat, or
during it, in buckets: overlap.py), the all-reduce algorithm, and the codec that compresses
gradients. All ranks start from the same weights and apply the same summed gradient, so replicas
stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.algorithms.ring import Library
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.comm.work import CompletedWork, Work
from paceline.compression import create as create_codec
from paceline.compression import option_names
from paceline.compression.codec import Shapes, State, drive
from paceline.errors import ConfigError
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape, Strategy

KIND = "gradients"


class GradientReducer:
    """Sums gradients over all ranks in place, with an algorithm and an optional codec."""

    def __init__(
        self, algorithm: str, codec: str, codec_options: dict[str, str], kind: str = KIND
    ) -> None:
        self.algorithm = ALGORITHMS.load(algorithm)()
        self.codec = None if codec == "none" else create_codec(codec, codec_options)
        self.kind = kind
        """Kind of traffic that the transfers are counted as."""
        self.is_library = self.codec is None and isinstance(self.algorithm, Library)
        """Whether the communicator's own non-blocking all-reduce is used."""

    def bind(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> Callable[[], Work]:
        """Return a function that starts the reduction of a gradient; it may block.

        The function is collective. If `is_library` is set, it is the communicator's all-reduce.
        """
        if communicator.world_size == 1:
            return CompletedWork
        if self.is_library:
            return partial(communicator.all_reduce, gradient, self.kind)
        return partial(self._reduce_blocking, communicator, key, gradient, shapes)

    def reduce(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes = ()
    ) -> None:
        """Reduce a flat contiguous gradient in place; blocks until it is complete. Collective.

        `key` identifies the gradient across steps; `shapes` are those of the tensors within it.
        """
        if communicator.world_size == 1:
            return
        if self.codec is None:
            self.algorithm.all_reduce(communicator, gradient, self.kind)
            return
        total = drive(
            self.codec.exchange(key, gradient, shapes),
            lambda payload: self._reduce_payload(communicator, payload),
            lambda payload: self._gather_payload(communicator, payload),
        )
        if total is not gradient:
            gradient.copy_(total)

    def capture_obstacle(self, communicator: Communicator) -> str | None:
        """Return why reductions cannot be captured in a CUDA graph; None if they can."""
        if self.codec is not None:
            return "a codec computes on the CPU"
        if communicator.world_size > 1 and not self.is_library:
            return library_obstacle(self.algorithm)
        return communicator.capture_obstacle()

    def _reduce_blocking(
        self, communicator: Communicator, key: str, gradient: Tensor, shapes: Shapes
    ) -> Work:
        self.reduce(communicator, key, gradient, shapes)
        return CompletedWork()

    def _reduce_payload(self, communicator: Communicator, payload: Tensor) -> Tensor:
        self.algorithm.all_reduce(communicator, payload, self.kind)
        return payload

    def _gather_payload(self, communicator: Communicator, payload: Tensor) -> list[Tensor]:
        """Return the payloads of all ranks, in rank order."""
        size = payload.numel()
        gathered = torch.empty(size * communicator.world_size, dtype=payload.dtype)
        gathered = gathered.to(payload.device)
        gathered[communicator.rank * size :][:size] = payload
        communicator.all_gather(gathered, self.kind).wait()
        return list(gathered.split(size)) if size else [payload] * communicator.world_size


def library_obstacle(algorithm: object) -> str | None:
    """Return why an all-reduce algorithm cannot be captured in a CUDA graph; None if it can."""
    return None if isinstance(algorithm, Library) else "only the library's all-reduce is captured"


class GradientAveraging(Strategy):
    """All-reduces each gradient after the backward pass; with `flat`, all of them at once."""

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
        """Loss scale of the last backward pass."""
        self._codec_before: State | None = None
        """Codec state before the current step; only kept if the loss scaler may skip the step."""
        options = {"chunk": chunk, "ratio": ratio, "rank": rank}
        self.reducer = GradientReducer(algorithm, codec, codec_options(codec, options))

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        # The communicator needs no copy to reduce memory that it has allocated.
        allocate = replica.communicator.zeros if self.reducer.is_library else torch.zeros
        gradients = FlatBuffer(replica.trainable, allocate=allocate)
        gradients.hold_gradients()
        replica.flat_gradients = gradients.tensor
        shapes = [tuple(weight.shape) for weight in replica.trainable]
        bind = partial(self.reducer.bind, replica.communicator)
        if self.flat:
            self._reductions = [bind("all", gradients.tensor, shapes)]
        else:
            self._reductions = [
                bind(str(index), gradients.flat(index), [shape])
                for index, shape in enumerate(shapes)
            ]

    def capture_obstacle(self) -> str | None:
        return self.reducer.capture_obstacle(self.replica.communicator)

    def noise_obstacle(self) -> str | None:
        codec = self.reducer.codec
        if codec is not None and not codec.keeps_norm:
            return "the codec changes the norm of the averaged gradient"
        return super().noise_obstacle()

    def backward(self, loss: Tensor) -> None:
        self._update_loss_scale()
        codec = self.reducer.codec
        if (
            codec is not None
            and self.replica.scaler.is_enabled()
            and self.replica.is_last_microbatch
        ):
            # The codec has not yet processed any gradient of this step.
            self._codec_before = codec.state_dict()
        super().backward(loss)

    def step(self) -> None:
        with self.replica.exposed_communication():
            works = []
            for start in self._reductions:
                works.append(start())  # noqa: PERF401 - a comprehension adds a frame
            for work in works:
                work.wait()
        self.replica.update()

    def _update_loss_scale(self) -> None:
        """Rescale the codec's residuals after the loss scale has changed.

        A smaller scale means that the scaler skipped the last step. None of its gradients were
        applied, so the codec is restored to its state before that step.
        """
        codec = self.reducer.codec
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
        costs = [self.reducer.algorithm.cost(shape.workers, size, network) for size in sizes]
        return Cost(
            seconds=sum(cost.seconds for cost in costs),
            bytes_sent=sum(cost.bytes_sent for cost in costs),
            messages=sum(cost.messages for cost in costs),
        )

    def state_dict(self) -> dict[str, Any]:
        self._update_loss_scale()
        codec = self.reducer.codec
        return {"codec": codec.state_dict()} if codec else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.reducer.codec:
            self.reducer.codec.load_state_dict(state["codec"])
            self._loss_scale = self._codec_before = None


def codec_options(codec: str, options: dict[str, str | None]) -> dict[str, str]:
    """Return the options that are set; raises ConfigError if the codec does not support one."""
    known = option_names(codec)
    problems = [
        f"-o {name}: codec {codec} has no such option"
        for name, value in options.items()
        if value is not None and name not in known
    ]
    if problems:
        raise ConfigError(problems)
    return {name: value for name, value in options.items() if value is not None}
