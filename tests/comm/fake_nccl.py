"""A stand-in for torch's NCCL backend: which message matches which, without a GPU.

As in torch, messages inside a group use the communicator of all ranks, and single messages one of
the two ranks. A communicator starts to work once all of its ranks have created their part of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

GPU = torch.device("meta")
"""Tensors without values: only sizes and partners matter here."""

Members = frozenset[int]


@dataclass
class FakeNetwork:
    """What the fake backends of all ranks share."""

    world_size: int
    lock: Lock = field(default_factory=Lock)
    created: dict[Members, set[int]] = field(default_factory=dict)
    sent: Counter[tuple[Members, int, int]] = field(default_factory=Counter)
    received: Counter[tuple[Members, int, int]] = field(default_factory=Counter)

    def create(self, members: Members, rank: int) -> None:
        with self.lock:
            self.created.setdefault(members, set()).add(rank)


@dataclass(frozen=True)
class _Message:
    members: Members
    sender: int
    receiver: int
    number: int
    is_sent_here: bool


class FakeHandle:
    def __init__(self, network: FakeNetwork, messages: list[_Message]) -> None:
        self._network, self._messages = network, messages

    def is_completed(self) -> bool:
        with self._network.lock:
            return all(self._is_matched(message) for message in self._messages)

    def _is_matched(self, message: _Message) -> bool:
        network = self._network
        partners = network.received if message.is_sent_here else network.sent
        route = (message.members, message.sender, message.receiver)
        is_ready = network.created[message.members] == set(message.members)
        return is_ready and partners[route] > message.number

    def wait(self) -> None:
        return


class FakeNccl:
    def __init__(self, network: FakeNetwork, rank: int) -> None:
        self._network, self._rank = network, rank
        self._everybody = frozenset(range(network.world_size))
        self._group: list[_Message] | None = None

    def eager_connect_single_device(self, _device: torch.device) -> None:
        self._network.create(self._everybody, self._rank)

    def _start_coalescing(self) -> None:
        self._group = []

    def _end_coalescing(self) -> FakeHandle:
        messages, self._group = self._group, None
        assert messages, "torch gives no handle for a group of nothing"
        return FakeHandle(self._network, messages)

    def send(self, tensors: list[Tensor], to: int, _tag: int) -> FakeHandle:
        return self._message(tensors, self._rank, to)

    def recv(self, tensors: list[Tensor], source: int, _tag: int) -> FakeHandle:
        return self._message(tensors, source, self._rank)

    def _message(self, tensors: list[Tensor], sender: int, receiver: int) -> FakeHandle:
        assert all(tensor.numel() > 0 for tensor in tensors)
        network, is_sent_here = self._network, sender == self._rank
        members = frozenset((sender, receiver)) if self._group is None else self._everybody
        network.create(members, self._rank)
        with network.lock:
            counts = network.sent if is_sent_here else network.received
            route = (members, sender, receiver)
            message = _Message(*route, counts[route], is_sent_here)
            counts[route] += 1
        if self._group is not None:
            self._group.append(message)
        return FakeHandle(network, [message])

    def abort(self) -> None:
        return
