"""Codec contract: a codec requests collectives, and its caller performs them.

An exchange is a generator. It yields requests (`Sum`, `Gather`), receives their results, and
returns the sum of the gradients of all workers. A codec therefore works with any communicator and
any all-reduce algorithm, its caller can do other work while a request is in progress, and all ranks
can run in one thread (testing.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sum:
    """Requests the element-wise sum of this tensor over all workers; may overwrite the tensor."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """Requests the tensors of all workers in rank order; the size must be the same everywhere."""

    tensor: Tensor


Exchange = Generator[Sum | Gather, Tensor | list[Tensor], T]
"""Yields requests, receives their results (a tensor for Sum, a list for Gather), returns a T.

A result must keep its contents until the exchange ends; it is not used afterward.
"""

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class WireBytes:
    """Bytes that one worker contributes to each request of one exchange, in order."""

    sums: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()


State = dict[str, dict[str, Tensor]]
"""Codec state: tensors by name of the state, then by gradient key."""


class Codec(ABC):
    """Compression on one worker; every worker has its own instance with the same options.

    The constructor's keyword arguments, typed and with defaults, are its command-line options.
    """

    lossless: ClassVar[bool] = False
    """Whether the sum is exactly the uncompressed one."""
    keeps_norm: ClassVar[bool] = False
    """Whether the sum differs from the uncompressed one only by rounding."""
    compresses_matrices: ClassVar[bool] = False
    """Whether it compresses each matrix by itself, so that `shapes` change its bytes and time."""

    @abstractmethod
    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        """Sum a gradient over all workers.

        `gradient` is flat, contiguous and already weighted, so that the sum is the desired average.
        It may be overwritten, and the result, of the same size and dtype, may share its memory.
        `key` identifies this gradient in every step and on every worker; the codec stores its state
        under it. `shapes` are the shapes of the tensors that the gradient concatenates; without
        them it is treated as one vector.

        The result is bit-identical on all workers. A NaN or infinity in the gradient of any worker
        makes the result non-finite, and does not affect later exchanges.
        """

    @abstractmethod
    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        """Return exactly the bytes that `exchange` requests for a gradient of this size."""

    def rescale(self, factor: float) -> None:  # noqa: B027 - most codecs have no state
        """Multiply the stored state by `factor`, because all later gradients are scaled by it.

        Called when fp16 loss scaling changes the scale.
        """

    def state_dict(self) -> State:
        """Return copies of the state that this worker keeps between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore a `state_dict` of the same rank."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {', '.join(state)}")


def summed(tensor: Tensor) -> Exchange[Tensor]:
    """Request a Sum: `total = yield from summed(tensor)` inside a codec."""
    result = yield Sum(tensor)
    if not isinstance(result, Tensor):
        raise TypeError("the result of a Sum must be a tensor")
    return result


def gathered(tensor: Tensor) -> Exchange[list[Tensor]]:
    """Request a Gather: `tensors = yield from gathered(tensor)` inside a codec."""
    result = yield Gather(tensor)
    if isinstance(result, Tensor):
        raise TypeError("the result of a Gather must be a list of tensors")
    return result


def drive(
    exchange: Exchange[T],
    all_reduce: Callable[[Tensor], Tensor],
    all_gather: Callable[[Tensor], list[Tensor]],
) -> T:
    """Run an exchange to completion, performing each request as it comes."""
    result: Tensor | list[Tensor] | None = None
    while True:
        try:
            request = exchange.send(result) if result is not None else next(exchange)
        except StopIteration as end:
            total: T = end.value
            return total
        if isinstance(request, Sum):
            result = all_reduce(request.tensor)
        else:
            result = all_gather(request.tensor)


def pack(*parts: Tensor) -> Tensor:
    """Concatenate the bytes of flat tensors into one message."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def unpack(payload: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """Split a message of `pack` into tensors, given the element count and dtype of each."""
    tensors = []
    begin = 0
    for elements, dtype in parts:
        end = begin + elements * dtype.itemsize
        raw = payload[begin:end]
        # A payload may be misaligned in a receive buffer, where wider dtypes cannot be viewed.
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        tensors.append(raw.view(dtype))
        begin = end
    return tensors
