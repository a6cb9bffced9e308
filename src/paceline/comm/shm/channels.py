"""Messages over shared memory: for every two workers and direction, two slots and two counters.

The sender fills a slot when the receiver has emptied it, and the receiver empties it when the
sender has filled it; a message longer than a slot goes in pieces. Nobody else has to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.comm.buffers import memcpy
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment

SLOTS = 2
NUMBERS_A_LINE = CACHE_LINE_BYTES // 8


class Channel:
    """From one worker to another, as one of the two sees it."""

    def __init__(
        self, counters: memoryview, number: int, memory: Tensor, call_peer: Callable[[], None]
    ) -> None:
        """`memory`: its slots; `call_peer`: for the one at the other end."""
        self.queue: deque[Transfer] = deque()
        """What has been begun here and is not over, in order."""
        self._counters, self._call_peer = counters, call_peer
        # Only one worker writes to a line.
        self._filled = number * 2 * NUMBERS_A_LINE
        self._emptied = (number * 2 + 1) * NUMBERS_A_LINE
        self._slots = memory.tensor_split(SLOTS)

    def writable_slot(self) -> Tensor | None:
        """The next slot to be filled, if it is empty."""
        filled = self._counters[self._filled]
        if filled - self._counters[self._emptied] == SLOTS:
            return None
        return self._slots[filled % SLOTS]

    def readable_slot(self) -> Tensor | None:
        """The next slot to be emptied, if it is filled."""
        emptied = self._counters[self._emptied]
        if self._counters[self._filled] == emptied:
            return None
        return self._slots[emptied % SLOTS]

    def has_filled(self) -> None:
        self._counters[self._filled] += 1
        self._call_peer()

    def has_emptied(self) -> None:
        self._counters[self._emptied] += 1
        self._call_peer()


class ChannelTable:
    """All channels of one worker."""

    def __init__(
        self,
        arena: SharedSegment,
        begin_byte: int,
        rank: int,
        world_size: int,
        slot_bytes: int,
        call_peer: Callable[[int], None],
    ) -> None:
        self._rank, self._world_size, self._call_peer = rank, world_size, call_peer
        pairs = world_size * world_size
        lines_bytes = pairs * 2 * CACHE_LINE_BYTES
        self._counters = arena.integers(begin_byte, lines_bytes)
        size_bytes = pairs * SLOTS * slot_bytes
        memory = arena.tensor(begin_byte + lines_bytes, size_bytes, torch.uint8)
        self._memory = memory.tensor_split(pairs)
        self._channels: dict[int, Channel] = {}

    @staticmethod
    def size_bytes(world_size: int, slot_bytes: int) -> int:
        return world_size * world_size * (2 * CACHE_LINE_BYTES + SLOTS * slot_bytes)

    def channel(self, sender: int, receiver: int) -> Channel:
        number = sender * self._world_size + receiver
        if number not in self._channels:
            peer = receiver if sender == self._rank else sender
            call_peer = partial(self._call_peer, peer)
            self._channels[number] = Channel(
                self._counters, number, self._memory[number], call_peer
            )
        return self._channels[number]


class Transfer:
    """A message under way, at its sender or at its receiver."""

    def __init__(self, channel: Channel, payload: Tensor, sends: bool) -> None:
        self._channel, self._sends = channel, sends
        self._payload = payload
        """Its bytes."""
        self._position = 0
        channel.queue.append(self)

    @property
    def is_complete(self) -> bool:
        return self._position == self._payload.numel()

    def progress(self) -> bool:
        """Fill or empty the slots that are ready; whether any was."""
        channel, moved = self._channel, False
        while channel.queue and channel.queue[0] is self:
            slot = channel.writable_slot() if self._sends else channel.readable_slot()
            if slot is None:
                break
            self._move(slot)
            moved = True
        return moved

    def _move(self, slot: Tensor) -> None:
        part = self._payload[self._position : self._position + slot.numel()]
        if self._sends:
            memcpy(slot, part)
            self._channel.has_filled()
        else:
            memcpy(part, slot)
            self._channel.has_emptied()
        self._position += part.numel()
        if self.is_complete:
            self._channel.queue.popleft()
