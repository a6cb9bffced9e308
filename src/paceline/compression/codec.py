"""What a codec is: it says which tensors to move, and leaves the moving to its caller.

An exchange is a generator. It yields requests (`Sum`, `Gather`), is sent their answers, and returns
the sum of all the workers' gradients. So a codec works over any communicator and any all-reduce
algorithm, its caller may do other things while a request is under way, and a whole team of workers
can be played through in one thread (lockstep.py).
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
    """Asks for the element-wise sum of this tensor over all workers, which may overwrite it."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Gather:
    """Asks for every worker's copy of this tensor, in rank order; it has one size everywhere."""

    tensor: Tensor


Exchange = Generator[Sum | Gather, Tensor | list[Tensor], T]
"""Yields requests, is sent their answers (a tensor; a list of them), returns a T.

An answer must keep its contents until the exchange ends; nothing of it is used after that.
"""

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class WireBytes:
    """What one worker hands over in the requests of one exchange, in bytes, in their order."""

    sums: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()


State = dict[str, dict[str, Tensor]]
"""What a codec remembers: by the name of the memory, then by the key of the gradient."""


class Codec(ABC):
    """One worker's end of the compression; every worker has its own, made with the same options.

    The arguments of its constructor, typed and with defaults, are its options on the command line.
    """

    lossless: ClassVar[bool] = False
    """Whether the sum comes out exactly as an uncompressed one would."""

    @abstractmethod
    def exchange(self, key: str, gradient: Tensor, shapes: Shapes = ()) -> Exchange[Tensor]:
        """Sum a gradient over all workers.

        `gradient` is flat, contiguous and weighted already, so that the sum is the average that is
        wanted. It may be overwritten, and the result, of the same size and type, may be the same
        memory. `key` names this gradient in every step and on every worker: what the codec
        remembers is kept under it. `shapes` are those of the tensors that lie one after the other
        in the gradient; without them it is taken for one vector.

        The result is the same on all workers, bit for bit. A NaN or an infinity in any worker's
        gradient leaves the result non-finite, and later exchanges are none the worse for it.
        """

    @abstractmethod
    def wire_bytes(self, elements: int, element_bytes: int, shapes: Shapes = ()) -> WireBytes:
        """Exactly what `exchange` asks to have moved for a gradient of this size."""

    def rescale(self, factor: float) -> None:  # noqa: B027 - most codecs remember nothing
        """From now on gradients come multiplied by this; so is what is remembered of earlier ones.

        fp16's loss scaling changes their size from time to time.
        """

    def state_dict(self) -> State:
        """Copies of what this worker remembers from step to step; each worker has its own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a `state_dict` of the same rank."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {', '.join(state)}")


def summed(tensor: Tensor) -> Exchange[Tensor]:
    """`total = yield from summed(tensor)` inside a codec."""
    answer = yield Sum(tensor)
    if not isinstance(answer, Tensor):
        raise TypeError("a Sum is answered with a tensor")
    return answer


def gathered(tensor: Tensor) -> Exchange[list[Tensor]]:
    """`copies = yield from gathered(tensor)` inside a codec."""
    answer = yield Gather(tensor)
    if isinstance(answer, Tensor):
        raise TypeError("a Gather is answered with a list of tensors")
    return answer


def drive(
    exchange: Exchange[T],
    sum_over_workers: Callable[[Tensor], Tensor],
    gather_from_workers: Callable[[Tensor], list[Tensor]],
) -> T:
    """Run an exchange to its end, carrying out each request when it comes."""
    answer: Tensor | list[Tensor] | None = None
    while True:
        try:
            request = exchange.send(answer) if answer is not None else next(exchange)
        except StopIteration as end:
            result: T = end.value
            return result
        if isinstance(request, Sum):
            answer = sum_over_workers(request.tensor)
        else:
            answer = gather_from_workers(request.tensor)


def pack(*parts: Tensor) -> Tensor:
    """The bytes of several flat tensors, one after the other: one message instead of many."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def unpack(payload: Tensor, *parts: tuple[int, torch.dtype]) -> list[Tensor]:
    """The tensors that `pack` put together, given the number of elements and the type of each."""
    tensors = []
    begin = 0
    for elements, dtype in parts:
        end = begin + elements * dtype.itemsize
        raw = payload[begin:end]
        # A payload may lie at an odd place in a receive buffer, where wider types cannot be viewed.
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()
        tensors.append(raw.view(dtype))
        begin = end
    return tensors
