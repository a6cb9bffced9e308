"""What is measured: each operation as one worker carries it out, and how its result is checked.

Tensors are floats that hold whole numbers small enough for every sum of them to be exact, so a
result is right or wrong and never nearly right. No two places of a chunk's length apart hold the
same number: a chunk that ends up in the wrong place shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.comm import ALGORITHMS
from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.commbench.spec import Case

KIND = "gradients"
ELEMENT_BYTES = 4
PERIOD = 65_521
"""A prime, so that it fits into no chunk a whole number of times."""
_NUMBERS = 251
ROOT = 0


class Operation(ABC):
    in_rows = True
    """Whether each ends only when all workers have begun it, so that many in a row take as long as
    one after the other; those that do not are timed one by one."""
    in_chunks = True
    """Whether the tensor is cut into equal chunks, one for each worker."""
    transfers = 1
    """How many of the operation one `run` does."""

    def __init__(self, communicator: Communicator, algorithm: str, buffer: Tensor) -> None:
        self.communicator = communicator
        self.tensor = buffer
        self.rank, self.workers = communicator.rank, communicator.world_size
        self._algorithm = algorithm

    @abstractmethod
    def run(self) -> None:
        """Once, from the start until this worker is done."""

    @abstractmethod
    def fill(self) -> None:
        """Write what the check expects to start from."""

    @abstractmethod
    def is_right(self) -> bool:
        """Whether this worker has what it should, after `fill` and one `run`."""

    def chunk(self, index: int) -> Tensor:
        return chunk(self.tensor, self.workers, index)

    @property
    def ranks_sum(self) -> int:
        return self.workers * (self.workers - 1) // 2


class AllReduce(Operation):
    in_chunks = False

    def run(self) -> None:
        ALGORITHMS.load(self._algorithm)().all_reduce(self.communicator, self.tensor, KIND)

    def fill(self) -> None:
        write(self.tensor, self.rank)

    def is_right(self) -> bool:
        return holds(self.tensor, self.workers, self.ranks_sum)


class ReduceScatter(Operation):
    def run(self) -> None:
        self.communicator.reduce_scatter(self.tensor, KIND).wait()

    def fill(self) -> None:
        for index in range(self.workers):
            write(self.chunk(index), self.rank + index)

    def is_right(self) -> bool:
        own = self.chunk(self.rank)
        return holds(own, self.workers, self.ranks_sum + self.workers * self.rank)


class AllGather(Operation):
    def run(self) -> None:
        self.communicator.all_gather(self.tensor, KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        write(self.chunk(self.rank), self.rank)

    def is_right(self) -> bool:
        return all(holds(self.chunk(index), 1, index) for index in range(self.workers))


class Broadcast(Operation):
    in_rows = in_chunks = False

    def run(self) -> None:
        self.communicator.broadcast(self.tensor, ROOT, KIND).wait()

    def fill(self) -> None:
        write(self.tensor, 1 if self.rank == ROOT else -1)

    def is_right(self) -> bool:
        return holds(self.tensor, 1, 1)


class Gather(Operation):
    in_rows = False

    def run(self) -> None:
        is_root = self.rank == ROOT
        parts = [self.chunk(index) for index in range(self.workers)] if is_root else None
        self.communicator.gather(self.chunk(self.rank), parts, ROOT, KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        write(self.chunk(self.rank), self.rank)

    def is_right(self) -> bool:
        expected = range(self.workers) if self.rank == ROOT else (self.rank,)
        return all(holds(self.chunk(index), 1, index) for index in expected)


class Scatter(Operation):
    in_rows = False

    def run(self) -> None:
        is_root = self.rank == ROOT
        parts = [self.chunk(index) for index in range(self.workers)] if is_root else None
        self.communicator.scatter(self.chunk(self.rank), parts, ROOT, KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        for index in range(self.workers if self.rank == ROOT else 0):
            write(self.chunk(index), index)

    def is_right(self) -> bool:
        return holds(self.chunk(self.rank), 1, self.rank)


class SendRecv(Operation):
    """Between the first worker and the last, to and fro; the others look on."""

    in_chunks = False
    transfers = 2

    def __init__(self, communicator: Communicator, algorithm: str, buffer: Tensor) -> None:
        super().__init__(communicator, algorithm, buffer)
        self._last = self.workers - 1
        self._arriving = torch.empty_like(buffer) if self.rank in (0, self._last) else buffer[:0]

    def run(self) -> None:
        if self.rank == 0:
            self.communicator.send(self.tensor, self._last, KIND).wait()
            self.communicator.recv(self._arriving, self._last, KIND).wait()
        elif self.rank == self._last:
            self.communicator.recv(self._arriving, 0, KIND).wait()
            self.communicator.send(self._arriving, 0, KIND).wait()

    def fill(self) -> None:
        write(self.tensor, 1)
        self._arriving.fill_(-1)

    def is_right(self) -> bool:
        return holds(self._arriving, 1, 1)


KINDS: dict[str, type[Operation]] = {
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "broadcast": Broadcast,
    "gather": Gather,
    "scatter": Scatter,
    "send_recv": SendRecv,
}


def elements_of(operation: str, size_bytes: int, workers: int) -> int:
    """How many a tensor of about this size has; fewer where chunks would be of unequal length."""
    elements = max(1, size_bytes // ELEMENT_BYTES)
    if KINDS[operation].in_chunks:
        return max(workers, elements // workers * workers)
    return elements


def make(way: Case, communicator: Communicator, buffer: Tensor, size_bytes: int) -> Operation:
    elements = elements_of(way.operation, size_bytes, communicator.world_size)
    return KINDS[way.operation](communicator, way.algorithm, buffer[:elements])


def write(tensor: Tensor, plus: int) -> None:
    pattern = _pattern(tensor.device)
    for part in tensor.split(PERIOD):
        torch.add(pattern[: part.numel()], plus, out=part)


def holds(tensor: Tensor, times: int, plus: int) -> bool:
    """Whether it is what `write` has written, so many times, and so much more."""
    expected = _pattern(tensor.device) * times + plus
    return all(torch.equal(part, expected[: part.numel()]) for part in tensor.split(PERIOD))


def _pattern(device: torch.device) -> Tensor:
    return (torch.arange(PERIOD, device=device) % _NUMBERS).to(torch.float32)
