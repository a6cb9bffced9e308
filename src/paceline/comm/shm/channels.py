"""Point-to-point messages through shared memory: double-buffered channels.

There is one channel for every ordered pair of ranks, with two slots and two counters. The sender
fills a slot once the receiver has emptied it, and the receiver empties it once the sender has
filled it. A message larger than a slot is transferred slot by slot. No other rank takes part.
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
INTEGERS_PER_LINE = CACHE_LINE_BYTES // 8


class Channel:
    """One direction of communication between two ranks, as seen by one of them."""

    def __init__(
        self, counters: memoryview, index: int, memory: Tensor, notify: Callable[[], None]
    ) -> None:
        """`memory` holds the slots; `notify` wakes the rank at the other end."""
        self.queue: deque[Message] = deque()
        """Messages of this rank that are in progress, in order."""
        self._counters, self._notify = counters, notify
        # Each counter has its own cache line, which only one rank writes.
        self._filled = index * 2 * INTEGERS_PER_LINE
        self._emptied = (index * 2 + 1) * INTEGERS_PER_LINE
        self._slots = memory.tensor_split(SLOTS)

    def writable_slot(self) -> Tensor | None:
        """Return the next slot to fill, or None if the receiver has not emptied it."""
        filled = self._counters[self._filled]
        if filled - self._counters[self._emptied] == SLOTS:
            return None
        return self._slots[filled % SLOTS]

    def readable_slot(self) -> Tensor | None:
        """Return the next slot to empty, or None if the sender has not filled it."""
        emptied = self._counters[self._emptied]
        if self._counters[self._filled] == emptied:
            return None
        return self._slots[emptied % SLOTS]

    def mark_filled(self) -> None:
        self._counters[self._filled] += 1
        self._notify()

    def mark_emptied(self) -> None:
        self._counters[self._emptied] += 1
        self._notify()


class ChannelTable:
    """The channels of one rank, created on first use."""

    def __init__(
        self,
        segment: SharedSegment,
        begin_byte: int,
        rank: int,
        world_size: int,
        slot_bytes: int,
        notify: Callable[[int], None],
    ) -> None:
        self._rank, self._world_size, self._notify = rank, world_size, notify
        pairs = world_size * world_size
        lines_bytes = pairs * 2 * CACHE_LINE_BYTES
        self._counters = segment.integers(begin_byte, lines_bytes)
        size_bytes = pairs * SLOTS * slot_bytes
        memory = segment.tensor(begin_byte + lines_bytes, size_bytes, torch.uint8)
        self._memory = memory.tensor_split(pairs)
        self._channels: dict[int, Channel] = {}

    @staticmethod
    def size_bytes(world_size: int, slot_bytes: int) -> int:
        return world_size * world_size * (2 * CACHE_LINE_BYTES + SLOTS * slot_bytes)

    def channel(self, sender: int, receiver: int) -> Channel:
        index = sender * self._world_size + receiver
        if index not in self._channels:
            peer = receiver if sender == self._rank else sender
            notify = partial(self._notify, peer)
            self._channels[index] = Channel(self._counters, index, self._memory[index], notify)
        return self._channels[index]


class Message:
    """A message in progress, at its sender or at its receiver."""

    def __init__(self, channel: Channel, payload: Tensor, sends: bool) -> None:
        """`payload` is a tensor of bytes."""
        self._channel, self._sends = channel, sends
        self._payload = payload
        self._position = 0
        channel.queue.append(self)

    @property
    def is_complete(self) -> bool:
        return self._position == self._payload.numel()

    def progress(self) -> bool:
        """Fill or empty all ready slots; return whether any slot was ready."""
        channel, has_progressed = self._channel, False
        while channel.queue and channel.queue[0] is self:
            slot = channel.writable_slot() if self._sends else channel.readable_slot()
            if slot is None:
                break
            self._transfer(slot)
            has_progressed = True
        return has_progressed

    def _transfer(self, slot: Tensor) -> None:
        part = self._payload[self._position : self._position + slot.numel()]
        if self._sends:
            memcpy(slot, part)
            self._channel.mark_filled()
        else:
            memcpy(part, slot)
            self._channel.mark_emptied()
        self._position += part.numel()
        if self.is_complete:
            self._channel.queue.popleft()
