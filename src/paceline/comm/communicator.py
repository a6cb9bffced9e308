"""The Communicator contract, with default collectives built on send and recv.

Every operation returns a `Work` immediately and completes in its `wait()`. A blocking call is
`communicator.all_reduce(gradient, "gradients").wait()`.

Rules for all operations:

- Tensors can have any dtype, any strides and any number of elements, including zero. Results are
  written in place.
- Messages between two ranks arrive in the order in which they were sent. All ranks start the same
  collectives in the same order. A communicator is used by one thread at a time; other threads use a
  duplicate (`dup`).
- Every transfer is counted in `traffic` under its `kind`, one of `records.TRAFFIC_KINDS`.
  Collectives built on sends and receives are counted message by message. Messages of library
  collectives (gloo, NCCL) cannot be observed, and shared-memory collectives have no messages. Both
  are counted by formula: all_reduce, reduce_scatter and all_gather as a ring (algorithms/ring.py),
  broadcast as a binomial tree (algorithms/tree.py). Empty tensors are not sent.
- If a peer exits, or does not respond within `timeout_seconds`, the operation raises a one-line
  `PeerError` that names the operation and its peers, either when it starts or in `wait()`. After an
  error, a communicator can only be closed.
- Operations on GPU tensors may be stream-ordered (work.py). If one fails after its `wait()`, the
  GPU is released, and the next call on the communicator raises the error (stream_monitor.py).
- The sum of bools is a logical or. All other dtypes are summed in their own precision.

reduce_scatter and all_gather split the flattened tensor into `world_size` chunks, one per rank,
whose sizes differ by at most one element (buffers.py). all_reduce is equivalent to reduce_scatter
followed by all_gather.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from paceline.comm.algorithms import ring, tree
from paceline.comm.background import CommunicationThread
from paceline.comm.buffers import StagingBuffer
from paceline.comm.work import CombinedWork, CompletedWork, Work
from paceline.errors import PeerError
from paceline.formatting import format_ranks
from paceline.measure.traffic import CountedTransfer, Traffic

DEFAULT_TIMEOUT_SECONDS = 300.0


class Communicator(ABC):
    """One rank's connections to the other ranks.

    Transports implement `send`, `recv`, `dup` and `_disconnect`, and override the collectives that
    they can perform faster.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        global_ranks: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is out of range for world size {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.traffic = traffic or Traffic()
        self.global_ranks = global_ranks or range(world_size)
        """The rank of each member among all workers of the run, for error messages."""
        self._background: CommunicationThread | None = None

    @abstractmethod
    def send(self, tensor: Tensor, to: int, kind: str) -> Work:
        """Send a tensor to one rank, which receives a tensor of the same dtype and size.

        On GPUs, the messages of a rank may run one at a time in the order in which it starts them.
        Two ranks that send to each other must therefore start in opposite orders or use `sendrecv`.
        """

    @abstractmethod
    def recv(self, tensor: Tensor, source: int, kind: str) -> Work:
        """Receive a tensor from `source`; see `send` for the order on GPUs."""

    def sendrecv(self, outgoing: Tensor, to: int, incoming: Tensor, source: int, kind: str) -> Work:
        """Send to one rank and receive from another at the same time."""
        return CombinedWork([self.recv(incoming, source, kind), self.send(outgoing, to, kind)])

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        """Copy the root's tensor to all ranks."""
        return self._in_background(
            tensor, lambda duplicate, flat: tree.broadcast(duplicate, flat, root, kind)
        )

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        """Collect the tensors of all ranks in the root's `parts`; other ranks pass None."""
        if self.rank != root:
            return self.send(tensor, root, kind)
        targets = self._check_parts(parts)
        targets[root].copy_(tensor.detach())
        return CombinedWork([self.recv(targets[peer], peer, kind) for peer in self.peers])

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        """Send each rank its entry of the root's `parts`; other ranks pass None."""
        if self.rank != root:
            return self.recv(tensor, root, kind)
        sources = self._check_parts(parts)
        tensor.detach().copy_(sources[root])
        return CombinedWork([self.send(sources[peer], peer, kind) for peer in self.peers])

    def reduce_scatter(self, tensor: Tensor, kind: str) -> Work:
        """Sum over all ranks in place: chunk `rank` holds the sum, other chunks are undefined."""
        return self._in_background(
            tensor, lambda duplicate, flat: ring.reduce_scatter(duplicate, flat, kind)
        )

    def all_gather(self, tensor: Tensor, kind: str) -> Work:
        """Collect the chunks of all ranks in place; each rank contributes chunk `rank`."""
        return self._in_background(
            tensor, lambda duplicate, flat: ring.all_gather(duplicate, flat, kind)
        )

    def all_reduce(self, tensor: Tensor, kind: str) -> Work:
        """Sum over all ranks in place; the result is bitwise identical on all ranks."""
        return self._in_background(
            tensor, lambda duplicate, flat: ring.Ring().all_reduce(duplicate, flat, kind)
        )

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a zero-filled tensor for repeated collectives, in memory that minimizes copies.

        Collective. All ranks must pass the same slice of their tensors to a collective.
        """
        return torch.zeros(elements, dtype=dtype, device=device)

    def barrier(self) -> Work:
        """Synchronize all ranks: the operation completes once every rank has started it."""
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), "control")

    def synchronize(self) -> None:  # noqa: B027 - most communicators block in `wait`
        """Block until all stream-ordered operations are complete; raise the error of a failed one.

        A failed operation leaves wrong results on the GPU. Call this before results leave it for
        good, for example in a checkpoint.
        """

    def capture_obstacle(self) -> str | None:
        """Return why operations on GPU tensors cannot be captured in a CUDA graph, if they cannot.

        A single rank has nothing to capture.
        """
        return None if self.world_size == 1 else "the workers communicate through the CPU"

    def replay_observers(self) -> list[Any]:
        """Return what has to know about captures and replays (training/gpu/cuda_graph.py)."""
        return [self.traffic]

    @abstractmethod
    def dup(self, traffic: Traffic | None = None) -> Self:
        """Create a communicator over the same ranks whose messages never mix with this one's.

        Collective. Its transfers are counted in `traffic`, by default this communicator's. The
        caller must close it.
        """

    def subgroup(self, ranks: Sequence[int], traffic: Traffic | None = None) -> Communicator:
        """Create a communicator over a subset of ranks.

        Each of these ranks must call this with the same `ranks`. They are renumbered in the given
        order. Transfers are counted in `traffic`, by default this communicator's. The caller must
        close it.
        """
        raise TypeError(f"{type(self).__name__} does not support subgroups: use torch.distributed")

    def close(self) -> None:
        """Release threads and connections; may be called repeatedly.

        Operations in progress fail, here and on peers that wait for this rank. To shut down
        cleanly, wait for a `barrier` first.
        """
        if self._background is not None:
            self._background.close()
            self._background = None
        self._disconnect()

    @abstractmethod
    def _disconnect(self) -> None:
        """Release the connections of this communicator; may be called repeatedly."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def context(self, name: str, peers: Sequence[int]) -> OperationContext:
        """Describe an operation for its error messages."""
        return OperationContext(
            self.global_ranks[self.rank], name, tuple(self.global_ranks[peer] for peer in peers)
        )

    def check_peer(self, peer: int) -> None:
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise ValueError(f"invalid peer {peer} for rank {self.rank} of {self.world_size}")

    def track_transfer(self, work: Work, transfer: CountedTransfer) -> Work:
        """End a transfer when the work that performs it ends."""
        if transfer.is_logged:
            work.add_done_callback(transfer.complete)
        return work.on_end(lambda moment: self.traffic.end(transfer, moment))

    def _in_background(
        self, tensor: Tensor, operation: Callable[[Communicator, Tensor], None]
    ) -> Work:
        """Run a collective on the communication thread, so that it overlaps with computation."""
        if self.world_size == 1 or tensor.numel() == 0:
            return CompletedWork()
        if self._background is None:
            self._background = CommunicationThread(self)
        staged = StagingBuffer.from_tensor(tensor)
        work = self._background.submit(
            lambda duplicate: operation(duplicate, staged.flat), staged.flat.device
        )
        return work.on_success(staged.copy_back)

    def _check_parts(self, parts: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if parts is None or len(parts) != self.world_size:
            raise ValueError(f"the root needs {self.world_size} parts, one per rank")
        return [part.detach() for part in parts]


@dataclass(frozen=True, slots=True)
class OperationContext:
    """The rank, name and peers of an operation, for one-line error messages."""

    rank: int
    name: str
    """Ends with a preposition, for example "recv from"."""
    peers: tuple[int, ...]

    def timed_out(self, seconds: float) -> PeerError:
        return self.failed(timeout_message(seconds))

    def failed(self, cause: str) -> PeerError:
        return PeerError(f"rank {self.rank}: {self.name} {format_ranks(self.peers)}: {cause}")


def timeout_message(seconds: float) -> str:
    """Return the error text for a peer that timed out; PyTorch's own tests look for "timeout"."""
    return f"no response within the timeout of {seconds:g} s"


def broadcast_counts(tensor: Tensor, rank: int, world_size: int, root: int) -> dict[str, int]:
    """Return the arguments of `Traffic.begin` for a broadcast along a binomial tree."""
    tree_rank = (rank - root) % world_size
    copies = len(tree.children(tree_rank, world_size))
    return {
        "bytes_sent": copies * tensor.nbytes,
        "bytes_received": tensor.nbytes if tree_rank else 0,
        "messages": copies,
    }


def reduce_scatter_counts(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    """Return the arguments of `Traffic.begin` for a reduce-scatter around a ring."""
    return _ring_counts(tensor, rank, world_size, ring.reduce_scatter_bytes_sent, rounds=1)


def all_gather_counts(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    """Return the arguments of `Traffic.begin` for an all-gather around a ring."""
    return _ring_counts(tensor, rank, world_size, ring.all_gather_bytes_sent, rounds=1)


def all_reduce_counts(tensor: Tensor, rank: int, world_size: int) -> dict[str, int]:
    """Return the arguments of `Traffic.begin` for an all-reduce around a ring."""
    return _ring_counts(tensor, rank, world_size, ring.Ring().bytes_sent, rounds=2)


def _ring_counts(
    tensor: Tensor,
    rank: int,
    world_size: int,
    bytes_sent: Callable[[int, int, int, int], int],
    rounds: int,
) -> dict[str, int]:
    left = (rank - 1) % world_size
    size = (world_size, tensor.numel(), tensor.element_size())
    return {
        "bytes_sent": bytes_sent(rank, *size),
        "bytes_received": bytes_sent(left, *size),
        "messages": rounds * (world_size - 1),
    }
