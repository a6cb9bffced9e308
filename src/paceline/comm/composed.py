"""Collectives made of sends and receives, for communicators whose library has none of its own.

gather and scatter are sends and receives that all start at once. The others go in steps, one
waiting for the one before, so they run on a background thread: they make progress while the caller
computes, and their messages cannot be mistaken for the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.algorithms import ring, tree
from paceline.comm.background import Background
from paceline.comm.communicator import Communicator
from paceline.comm.staging import Staged
from paceline.comm.work import AllOf, Done, Work
from paceline.measure.traffic import Traffic


class ComposedCommunicator(Communicator):
    """What is left to write is `send`, `recv`, `fork` and `_disconnect`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        traffic: Traffic | None,
        known_as: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, world_size, timeout_seconds, traffic, known_as)
        self._background: Background | None = None

    def broadcast(self, tensor: Tensor, root: int, kind: str) -> Work:
        return self._in_steps(tensor, lambda fork, flat: tree.broadcast(fork, flat, root, kind))

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        if self.rank != root:
            return self.send(tensor, root, kind)
        places = self._check_parts(parts)
        places[root].copy_(tensor.detach())
        return AllOf([self.recv(places[peer], peer, kind) for peer in self.peers])

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, root: int, kind: str) -> Work:
        if self.rank != root:
            return self.recv(tensor, root, kind)
        places = self._check_parts(parts)
        tensor.detach().copy_(places[root])
        return AllOf([self.send(places[peer], peer, kind) for peer in self.peers])

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
            return Done()
        if self._background is None:
            self._background = Background(self)
        staged = Staged.of(tensor)
        work = self._background.submit(lambda fork: steps(fork, staged.flat), staged.flat.device)
        return work.on_success(staged.copy_back)

    def _check_parts(self, parts: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if parts is None or len(parts) != self.world_size:
            raise ValueError(f"the root needs {self.world_size} parts, one for each rank")
        return [part.detach() for part in parts]
