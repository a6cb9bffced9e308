"""The operations that are timed, and how each worker checks their results.

Tensors are floats that hold integers small enough for every sum to be exact, so a result is either
right or wrong. The pattern of integers has a prime period, so a chunk at the wrong offset is
detected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.comm.algorithms import ALGORITHMS
from paceline.comm.buffers import chunk
from paceline.comm.communicator import Communicator
from paceline.commbench.spec import Case

TRAFFIC_KIND = "gradients"
ELEMENT_BYTES = 4
PERIOD = 65_521
"""A prime, so that no chunk holds a whole number of periods."""
_DISTINCT_VALUES = 251
ROOT = 0


class Operation(ABC):
    """An operation on one worker's tensor."""

    can_batch = True
    """Whether no worker can finish before all have started. Others would overlap in a batch, so
    they are timed one at a time."""
    is_chunked = True
    """Whether the tensor is divided into equal chunks, one for each worker."""
    transfers = 1
    """Number of operations that one `run` performs."""

    def __init__(self, communicator: Communicator, algorithm: str, buffer: Tensor) -> None:
        self.communicator = communicator
        self.tensor = buffer
        self.rank, self.workers = communicator.rank, communicator.world_size
        self._algorithm = algorithm

    @abstractmethod
    def run(self) -> None:
        """Run the operation once, until it is complete on this worker."""

    @abstractmethod
    def fill(self) -> None:
        """Write the input that `is_correct` assumes."""

    @abstractmethod
    def is_correct(self) -> bool:
        """Whether this worker's result is right after `fill` and one `run`."""

    def chunk(self, index: int) -> Tensor:
        return chunk(self.tensor, self.workers, index)

    @property
    def ranks_sum(self) -> int:
        return self.workers * (self.workers - 1) // 2


class AllReduce(Operation):
    is_chunked = False

    def run(self) -> None:
        ALGORITHMS.load(self._algorithm)().all_reduce(self.communicator, self.tensor, TRAFFIC_KIND)

    def fill(self) -> None:
        write_pattern(self.tensor, self.rank)

    def is_correct(self) -> bool:
        return matches_pattern(self.tensor, self.workers, self.ranks_sum)


class ReduceScatter(Operation):
    def run(self) -> None:
        self.communicator.reduce_scatter(self.tensor, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        for index in range(self.workers):
            write_pattern(self.chunk(index), self.rank + index)

    def is_correct(self) -> bool:
        own = self.chunk(self.rank)
        return matches_pattern(own, self.workers, self.ranks_sum + self.workers * self.rank)


class AllGather(Operation):
    def run(self) -> None:
        self.communicator.all_gather(self.tensor, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        write_pattern(self.chunk(self.rank), self.rank)

    def is_correct(self) -> bool:
        return all(matches_pattern(self.chunk(index), 1, index) for index in range(self.workers))


class Broadcast(Operation):
    can_batch = is_chunked = False

    def run(self) -> None:
        self.communicator.broadcast(self.tensor, ROOT, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        write_pattern(self.tensor, 1 if self.rank == ROOT else -1)

    def is_correct(self) -> bool:
        return matches_pattern(self.tensor, 1, 1)


class Gather(Operation):
    can_batch = False

    def run(self) -> None:
        is_root = self.rank == ROOT
        parts = [self.chunk(index) for index in range(self.workers)] if is_root else None
        self.communicator.gather(self.chunk(self.rank), parts, ROOT, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        write_pattern(self.chunk(self.rank), self.rank)

    def is_correct(self) -> bool:
        expected = range(self.workers) if self.rank == ROOT else (self.rank,)
        return all(matches_pattern(self.chunk(index), 1, index) for index in expected)


class Scatter(Operation):
    can_batch = False

    def run(self) -> None:
        is_root = self.rank == ROOT
        parts = [self.chunk(index) for index in range(self.workers)] if is_root else None
        self.communicator.scatter(self.chunk(self.rank), parts, ROOT, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        self.tensor.fill_(-1)
        for index in range(self.workers if self.rank == ROOT else 0):
            write_pattern(self.chunk(index), index)

    def is_correct(self) -> bool:
        return matches_pattern(self.chunk(self.rank), 1, self.rank)


class SendRecv(Operation):
    """A round trip between the first worker and the last; the others do nothing."""

    is_chunked = False
    transfers = 2

    def __init__(self, communicator: Communicator, algorithm: str, buffer: Tensor) -> None:
        super().__init__(communicator, algorithm, buffer)
        self._last = self.workers - 1
        self._received = torch.empty_like(buffer) if self.rank in (0, self._last) else buffer[:0]

    def run(self) -> None:
        if self.rank == 0:
            self.communicator.send(self.tensor, self._last, TRAFFIC_KIND).wait()
            self.communicator.recv(self._received, self._last, TRAFFIC_KIND).wait()
        elif self.rank == self._last:
            self.communicator.recv(self._received, 0, TRAFFIC_KIND).wait()
            self.communicator.send(self._received, 0, TRAFFIC_KIND).wait()

    def fill(self) -> None:
        write_pattern(self.tensor, 1)
        self._received.fill_(-1)

    def is_correct(self) -> bool:
        return matches_pattern(self._received, 1, 1)


OPERATION_TYPES: dict[str, type[Operation]] = {
    "all_reduce": AllReduce,
    "reduce_scatter": ReduceScatter,
    "all_gather": AllGather,
    "broadcast": Broadcast,
    "gather": Gather,
    "scatter": Scatter,
    "send_recv": SendRecv,
}


def elements_of(operation: str, size_bytes: int, workers: int) -> int:
    """Elements of a tensor of about this size, rounded so that all chunks have equal length."""
    elements = max(1, size_bytes // ELEMENT_BYTES)
    if OPERATION_TYPES[operation].is_chunked:
        return max(workers, elements // workers * workers)
    return elements


def make(case: Case, communicator: Communicator, buffer: Tensor, size_bytes: int) -> Operation:
    elements = elements_of(case.operation, size_bytes, communicator.world_size)
    return OPERATION_TYPES[case.operation](communicator, case.algorithm, buffer[:elements])


def write_pattern(tensor: Tensor, offset: int) -> None:
    pattern = _pattern(tensor.device)
    for part in tensor.split(PERIOD):
        torch.add(pattern[: part.numel()], offset, out=part)


def matches_pattern(tensor: Tensor, times: int, offset: int) -> bool:
    """Whether the tensor is the pattern multiplied by `times`, plus `offset`."""
    expected = _pattern(tensor.device) * times + offset
    return all(torch.equal(part, expected[: part.numel()]) for part in tensor.split(PERIOD))


def _pattern(device: torch.device) -> Tensor:
    return (torch.arange(PERIOD, device=device) % _DISTINCT_VALUES).to(torch.float32)
