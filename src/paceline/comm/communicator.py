"""How collectives are counted that cannot be looked into, or that are to be counted alike.

all_reduce, reduce_scatter and all_gather count as a ring (algorithms/ring.py), broadcast as a
binomial tree (algorithms/tree.py), whatever carries them out. Each function gives the arguments of
`Traffic.begin`.

The contract of a communicator: how one worker talks to the others.

Every operation returns a `Work` at once and is finished by its `wait()`; so each of them is there
in a blocking form, `communicator.all_reduce(gradient, "gradients").wait()`, and in a non-blocking
one.

What holds for all operations:

- A tensor has any dtype, any number of elements, zero included, and any strides. Results are
  written into the tensors given.
- Between two workers, messages arrive in the order in which they were sent. All workers start the
  same collectives in the same order. A thread of its own needs a communicator of its own: `dup`.
- Every transfer is counted in `traffic` under the `kind` given, one of `records.TRAFFIC_KINDS`.
  What is composed of sends and receives is counted message by message; a library's own collective
  cannot be looked into, and one through shared memory has no messages: these are counted by
  formula, so that all count alike: all_reduce, reduce_scatter and all_gather as a ring (see
  algorithms/ring.py), broadcast as a binomial tree (algorithms/tree.py). Empty tensors are not
  sent.
- A peer that is silent for `timeout_seconds`, or gone, ends an operation, at its start or in its
  `wait()`, with a `PeerError` of one line that names the operation and the peers it may be. After
  an error a communicator can only be closed.
- Sums of bool are "or"; those of all other dtypes are what adding gives in that dtype.

reduce_scatter and all_gather see the flat tensor as `world_size` chunks that differ by at most one
element (algorithms/chunks.py), one for each rank; so all_reduce is the one followed by the other.

Collectives made of sends and receives, for communicators whose library has none of its own.

gather and scatter are sends and receives that all start at once. The others go in steps, one
waiting for the one before, so they run on a background thread: they make progress while the caller
computes, and their messages cannot be mistaken for the caller's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline.comm.algorithms import ring, tree
from paceline.comm.algorithms.tree import children
from paceline.comm.background import CommunicationThread
from paceline.comm.buffers import StagingBuffer
from paceline.comm.work import CombinedWork, CompletedWork, Work
from paceline.errors import PeerError
from paceline.measure.traffic import CountedTransfer, Traffic

Formula = Callable[[int, int, int, int], int]
"""Bytes sent, from rank, world size, elements and bytes of an element."""


def broadcast(tensor: Tensor, rank: int, world_size: int, root: int) -> dict[str, int]:
    place = (rank - root) % world_size
    copies = len(children(place, world_size))
    return {
        "bytes_sent": copies * tensor.nbytes,
        "bytes_received": tensor.nbytes if place else 0,
        "messages": copies,
    }


def reduce_scatter(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(1, ring.reduce_scatter_bytes_sent, tensor, rank, world_size)


def all_gather(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(1, ring.all_gather_bytes_sent, tensor, rank, world_size)


def all_reduce(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    return _laps(2, ring.Ring().bytes_sent, tensor, rank, world_size)


def _laps(
    laps: int, formula: Formula, tensor: Tensor, rank: int, world_size: int
) -> dict[str, int]:
    left = (rank - 1) % world_size
    size = (world_size, tensor.numel(), tensor.element_size())
    return {
        "bytes_sent": formula(rank, *size),
        "bytes_received": formula(left, *size),
        "messages": laps * (world_size - 1),
    }


DEFAULT_TIMEOUT_SECONDS = 300.0


class Communicator(ABC):
    """One worker's end of the connections between `world_size` workers."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of 0 to {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.traffic = traffic or Traffic()
        self.global_ranks = global_ranks or range(world_size)
        """The ranks' numbers among all workers, by which messages name them."""

    @abstractmethod
    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        """Send a tensor to one rank, which receives one of the same dtype and size.

        On GPUs, messages may run one after the other in the order in which a rank starts them. So
        two ranks that send to each other start in opposite orders, or use `sendrecv`.
        """

    @abstractmethod
    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        """Receive into a tensor what `source` sends to this rank; for the order, see `send`."""

    def sendrecv(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, kind: str) -> Work:
        """Send to one rank and receive from one at the same time: what rings are made of."""
        return CombinedWork([self.recv(incoming, source, kind), self.send(outgoing, to, kind)])

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        """Give every rank the root's tensor."""

    @abstractmethod
    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        """Collect the tensors of all ranks in the root's `parts`, one a rank; elsewhere None."""

    @abstractmethod
    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        """Deal out the root's `parts`, one to each rank's tensor; elsewhere parts is None."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        """Sum over the ranks, in place: chunk `rank` gets its sum, the others are undefined."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        """Fill in, in place, the chunks of all ranks; each rank brings chunk `rank`."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        """Sum over the ranks, in place; the same bits on every rank."""

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor to be exchanged many times, which lies where that takes fewest copies.

        Collective. All ranks exchange the same part of theirs together.
        """
        return torch.zeros(elements, dtype=dtype, device=device)

    def barrier(self) -> Work:
        """Completes once every rank has started it."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), "control")

    @abstractmethod
    def dup(self) -> Self:
        """Another communicator over the same workers, whose messages never mix with this one's.

        Collective. It counts into the same traffic. Whoever makes one closes it.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back threads and connections; may be repeated.

        What is under way fails, here and at the peers that still wait for this rank. Who wants to
        part in peace waits for a `barrier` first.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def track_transfer(self, work: Work, transfer: CountedTransfer) -> Work:
        """Let a transfer end with the work that carries it out."""
        if transfer.is_logged:
            work.add_done_callback(transfer.complete)
        return work.on_end(lambda: self.traffic.end(transfer))

    def operation(self, name: str, peers: Sequence[int]) -> OperationContext:
        return OperationContext(
            self.global_ranks[self.rank], name, tuple(self.global_ranks[peer] for peer in peers)
        )

    def check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} has no peer {peer}")


def no_answer(seconds: float) -> str:
    """The cause of a failure, where a peer was silent for its timeout."""
    return f"no answer within the timeout of {seconds:g} s"


@dataclass(frozen=True, slots=True)
class OperationContext:
    """Who does what with whom, for the one line that an error has."""

    rank: int
    name: str
    """With its preposition, as in "recv from"."""
    peers: tuple[int, ...]

    def timed_out(self, seconds: float) -> PeerError:
        return self.failed(no_answer(seconds))

    def failed(self, cause: str) -> PeerError:
        return PeerError(f"rank {self.rank}: {self.name} {format_ranks(self.peers)}: {cause}")


def format_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """`rank 2`, `ranks 0, 2`, `ranks 0-6, 8-15`; the ranks in ascending order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )
    return f"{noun}{'' if len(ranks) == 1 else 's'} {text}"


class ComposedCommunicator(Communicator):
    """What is left to write is `send`, `recv`, `dup` and `_disconnect`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, world_size, timeout_seconds, traffic, global_ranks)
        self._background: CommunicationThread | None = None

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return self._in_steps(tensor, lambda fork, flat: tree.broadcast(fork, flat, root, kind))

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        if self.rank != root:
            return self.send(tensor, root, kind)
        places = self._check_parts(parts)
        places[root].copy_(tensor.detach())
        return CombinedWork([self.recv(places[peer], peer, kind) for peer in self.peers])

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        if self.rank != root:
            return self.recv(tensor, root, kind)
        places = self._check_parts(parts)
        tensor.detach().copy_(places[root])
        return CombinedWork([self.send(places[peer], peer, kind) for peer in self.peers])

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        return self._in_steps(tensor, lambda fork, flat: ring.reduce_scatter(fork, flat, kind))

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        return self._in_steps(tensor, lambda fork, flat: ring.all_gather(fork, flat, kind))

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        return self._in_steps(tensor, lambda fork, flat: ring.Ring().all_reduce(fork, flat, kind))

    def close(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None
        self._disconnect()

    def _disconnect(self) -> None:
        """Give back the connections of this communicator itself."""

    def _in_steps(self, tensor: Tensor, steps: Callable[[Communicator, Tensor], None]) -> Work:
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        if self._background is None:
            self._background = CommunicationThread(self)
        staged = StagingBuffer.of(tensor)
        work = self._background.submit(lambda fork: steps(fork, staged.flat), staged.flat.device)
        return work.on_success(staged.copy_back)

    def _check_parts(self, parts: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if parts is None or len(parts) != self.world_size:
            raise ValueError(f"the root needs {self.world_size} parts, one for each rank")
        return [part.detach() for part in parts]
