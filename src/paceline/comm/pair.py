"""Messages over shared memory: for every two workers and direction, two slots and two counters.

The sender fills a slot when the receiver has emptied it, and the receiver empties it when the
sender has filled it; a message longer than a slot goes in pieces. Nobody else has to know.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from paceline.comm.arena import LINE_BYTES, Arena

SLOTS = 2


class Channel:
    """From one worker to another, as one of the two sees it."""

    def __init__(self, pairs: Pairs, number: int) -> None:
        self.queue: deque[Transfer] = deque()
        """What has been begun here and is not over, in order."""
        self._filled = number * 2
        self._emptied = number * 2 + 1
        self._pairs = pairs
        begin = number * SLOTS * pairs.slot_bytes
        memory = pairs.memory[begin : begin + SLOTS * pairs.slot_bytes]
        self._slots: list[Tensor] = list(memory.split(pairs.slot_bytes))

    def room(self) -> Tensor | None:
        """The next slot to be filled, if it is empty."""
        filled = self._pairs.count(self._filled)
        if filled - self._pairs.count(self._emptied) == SLOTS:
            return None
        return self._slots[filled % SLOTS]

    def letter(self) -> Tensor | None:
        """The next slot to be emptied, if it is filled."""
        emptied = self._pairs.count(self._emptied)
        if self._pairs.count(self._filled) == emptied:
            return None
        return self._slots[emptied % SLOTS]

    def has_filled(self) -> None:
        self._pairs.add_one(self._filled)

    def has_emptied(self) -> None:
        self._pairs.add_one(self._emptied)


class Pairs:
    """All channels of one worker."""

    def __init__(
        self, arena: Arena, begin_byte: int, rank: int, world_size: int, slot_bytes: int
    ) -> None:
        self.slot_bytes = slot_bytes
        self._rank, self._world_size = rank, world_size
        pairs = world_size * world_size
        lines_bytes = pairs * 2 * LINE_BYTES
        self._counters = arena.numbers(begin_byte, lines_bytes)
        self.memory = arena.tensor(
            begin_byte + lines_bytes, pairs * SLOTS * slot_bytes, torch.uint8
        )
        self._channels: dict[int, Channel] = {}

    @staticmethod
    def size_bytes(world_size: int, slot_bytes: int) -> int:
        return world_size * world_size * (2 * LINE_BYTES + SLOTS * slot_bytes)

    def channel(self, sender: int, receiver: int) -> Channel:
        number = sender * self._world_size + receiver
        if number not in self._channels:
            self._channels[number] = Channel(self, number)
        return self._channels[number]

    def count(self, line: int) -> int:
        return self._counters[line * (LINE_BYTES // 8)]

    def add_one(self, line: int) -> None:
        """Only one worker writes to a line."""
        self._counters[line * (LINE_BYTES // 8)] += 1


class Transfer:
    """A message under way, at its sender or at its receiver."""

    def __init__(self, channel: Channel, payload: Tensor, sends: bool) -> None:
        self._channel, self._sends = channel, sends
        self._payload = payload
        """Its bytes."""
        self._position = 0
        channel.queue.append(self)

    @property
    def is_over(self) -> bool:
        return self._position == self._payload.numel()

    def advance(self) -> bool:
        """Fill or empty the slots that are ready; whether any was."""
        channel, moved = self._channel, False
        while channel.queue and channel.queue[0] is self:
            slot = channel.room() if self._sends else channel.letter()
            if slot is None:
                break
            self._move(slot)
            moved = True
        return moved

    def _move(self, slot: Tensor) -> None:
        part = self._payload[self._position : self._position + slot.numel()]
        if self._sends:
            slot[: part.numel()].copy_(part)
            self._channel.has_filled()
        else:
            part.copy_(slot[: part.numel()])
            self._channel.has_emptied()
        self._position += part.numel()
        if self.is_over:
            self._channel.queue.popleft()
