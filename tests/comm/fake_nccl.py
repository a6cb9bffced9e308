"""A fake of torch's NCCL backend that matches messages without a GPU.

As in torch, messages inside a group use the communicator of all ranks, and single messages one of
the two ranks. A communicator starts to work once all of its ranks have created their part of it.
The groups of a rank run one after the other, as on a stream: a message is delivered when both of
its ranks have come to it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

GPU = torch.device("meta")
"""Tensors without values, because only sizes and peers matter."""

Members = frozenset[int]


@dataclass(frozen=True)
class _Message:
    members: Members
    sender: int
    receiver: int
    number: int
    """Index of the message on its route."""


@dataclass(eq=False)
class _Group:
    """Messages that a rank starts together."""

    waiting: set[_Message]


@dataclass
class FakeNetwork:
    """State that the fake backends of all ranks share."""

    world_size: int
    lock: Lock = field(default_factory=Lock)
    created: dict[Members, set[int]] = field(default_factory=dict)
    started: Counter[tuple[int, Members, int, int]] = field(default_factory=Counter)
    """Messages by the rank that started its half, and by route."""
    streams: dict[int, deque[_Group]] = field(default_factory=dict)
    """Groups of each rank in progress, in the order in which they were started."""

    def create(self, members: Members, rank: int) -> None:
        with self.lock:
            self.created.setdefault(members, set()).add(rank)

    def message(self, rank: int, members: Members, sender: int, receiver: int) -> _Message:
        with self.lock:
            route = (rank, members, sender, receiver)
            number = self.started[route]
            self.started[route] += 1
            return _Message(members, sender, receiver, number)

    def start(self, rank: int, messages: list[_Message]) -> _Group:
        group = _Group(set(messages))
        with self.lock:
            self.streams.setdefault(rank, deque()).append(group)
        return group

    def is_completed(self, group: _Group) -> bool:
        with self.lock:
            while self._advance():
                pass
            return not group.waiting

    def _advance(self) -> bool:
        """Deliver messages that both ranks have reached; return whether a stream progressed."""
        heads = {rank: stream[0] for rank, stream in self.streams.items() if stream}
        for group in heads.values():
            for message in list(group.waiting):
                both = [heads.get(message.sender), heads.get(message.receiver)]
                is_ready = self.created[message.members] == set(message.members)
                if is_ready and all(each and message in each.waiting for each in both):
                    for each in both:
                        assert each is not None
                        each.waiting.discard(message)
        ended = [rank for rank, group in heads.items() if not group.waiting]
        for rank in ended:
            self.streams[rank].popleft()
        return bool(ended)


class FakeHandle:
    def __init__(self, network: FakeNetwork, group: _Group) -> None:
        self._network, self._group = network, group

    def is_completed(self) -> bool:
        return self._network.is_completed(self._group)

    def wait(self) -> None:
        return


class FakeNccl:
    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self._network, self._rank = network, rank
        self._all_ranks = frozenset(range(network.world_size))
        self._group: list[_Message] | None = None

    def eager_connect_single_device(self, _device: torch.device) -> None:
        self._network.create(self._all_ranks, self._rank)

    def _start_coalescing(self) -> None:
        self._group = []

    def _end_coalescing(self) -> FakeHandle:
        messages, self._group = self._group, None
        assert messages, "torch gives no handle for a group of nothing"
        return FakeHandle(self._network, self._network.start(self._rank, messages))

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> FakeHandle | None:
        return self._message(tensors, self._rank, to)

    def recv(self, tensors: list[Tensor], source: int, _tag: int) -> FakeHandle | None:
        return self._message(tensors, source, self._rank)

    def _message(self, tensors: list[Tensor], sender: int, receiver: int) -> FakeHandle | None:
        assert all(tensor.numel() > 0 for tensor in tensors)
        network, rank = self._network, self._rank
        members = frozenset((sender, receiver)) if self._group is None else self._all_ranks
        network.create(members, rank)
        message = network.message(rank, members, sender, receiver)
        if self._group is None:
            return FakeHandle(network, network.start(rank, [message]))
        self._group.append(message)
        return None

    def abort(self) -> None:
        return
