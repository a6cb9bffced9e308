"""Collectives in shared memory, as state machines that never block.

Every rank has a buffer of two slots that all other ranks can read. A collective runs in rounds, and
each round transfers as much of the tensor as fits into a slot, in up to three stages:

- copy in: copy what the other ranks need into the slot of this rank;
- reduce: once all ranks have copied in, sum the own chunk over all slots, into the own slot;
- copy out: once all ranks have reduced, copy their chunks from their slots.

So rank i reduces chunk i. Each rank writes only its own cache line of counters, which hold the
number of rounds that it has completed in each stage. Rounds are numbered across all collectives,
and a rank completes each stage in that order even if several collectives are in progress. With two
slots, the stages of successive rounds overlap, and the slots are small enough to stay in a cache
until the other ranks read them. Small tensors skip the reduce stage: every rank copies in the whole
tensor and sums all slots itself, in rank order, so that all ranks get the same bits.

Tensors in `SymmetricMemory` are reduced in place: rank i sums chunk i over the tensors of all ranks
and writes the sum to all of them. Every byte is read and written once, and no slot is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.comm.buffers import chunk, chunk_elements, memcpy
from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_scalars
from paceline.comm.shm.futex import memory_fence
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment, aligned_offsets
from paceline.errors import RunError

SLOTS = 2
"""Per rank."""
COPIED_IN, REDUCED, COPIED_OUT = range(3)
"""Stages, by the index of their counter."""
INTEGERS_PER_LINE = CACHE_LINE_BYTES // 8
CACHED_BYTES = 256 * 1024
"""Size of one step of an in-place sum, which stays in a cache until it is written to all ranks."""


class CollectiveBuffers:
    """The counters and slots of all ranks, as seen by `rank`."""

    def __init__(
        self,
        segment: SharedSegment,
        begin_byte: int,
        rank: int,
        world_size: int,
        slot_bytes: int,
        notify_all: Callable[[], None],
    ) -> None:
        """`notify_all` wakes the ranks that wait until all ranks have completed a stage."""
        self.rank, self.world_size, self.slot_bytes = rank, world_size, slot_bytes
        self._notify_all = notify_all
        self.next_round = 0
        """The number of the next round; all ranks start the same collectives in the same order."""
        lines_bytes = world_size * CACHE_LINE_BYTES
        self._counters = segment.integers(begin_byte, lines_bytes)
        self._memory = segment.tensor(
            begin_byte + lines_bytes, world_size * SLOTS * slot_bytes, torch.uint8
        )
        self._own_line = rank * INTEGERS_PER_LINE
        self._lines = [each * INTEGERS_PER_LINE for each in range(world_size)]
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @staticmethod
    def size_bytes(world_size: int, slot_bytes: int) -> int:
        return world_size * (CACHE_LINE_BYTES + SLOTS * slot_bytes)

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """Return the slot of a rank for a round."""
        key = (rank, number % SLOTS, dtype)
        if key not in self._views:
            begin = (rank * SLOTS + number % SLOTS) * self.slot_bytes
            self._views[key] = self._memory[begin : begin + self.slot_bytes].view(dtype)
        return self._views[key]

    def is_next(self, stage: int, number: int) -> bool:
        """Return whether this rank has completed a stage of all rounds before this one."""
        return self._counters[self._own_line + stage] == number

    def skip(self, stage: int, number: int) -> None:
        """Complete a stage that a round does not have and no rank waits for."""
        self._counters[self._own_line + stage] = number + 1

    def publish(self, stage: int, number: int) -> None:
        """Complete a stage of a round and wake the peers if this rank is the last."""
        self._counters[self._own_line + stage] = number + 1
        # Waiting ranks wait for all ranks, so only the last rank wakes them. With the fence, of two
        # ranks that publish at the same time, at least one sees the counter of the other.
        memory_fence()
        if self.is_completed_by_all(stage, number):
            self._notify_all()

    def is_completed_by_all(self, stage: int, number: int) -> bool:
        """Return whether all ranks have completed a stage of a round."""
        counters = self._counters
        for line in self._lines:  # noqa: SIM110 - runs while spinning, where any() is slower
            if counters[line + stage] <= number:
                return False
        return True


class Collective(ABC):
    """One operation on a flat tensor, which progresses as far as possible without blocking."""

    reduces: ClassVar[bool] = True
    """Whether it has a reduce stage."""
    copies_out: ClassVar[bool] = True
    """Whether it has a copy-out stage."""

    def __init__(self, buffers: CollectiveBuffers, flat: Tensor) -> None:
        self.buffers, self.flat = buffers, flat
        self.rank, self.world_size = buffers.rank, buffers.world_size
        self.round_elements = self.elements_per_round()
        self._rounds = max(1, -(-self.elements_in_total() // self.round_elements))
        self._first = buffers.next_round
        buffers.next_round += self._rounds
        self._completed = [0, 0, 0]
        """Rounds completed in each stage."""

    @property
    def is_complete(self) -> bool:
        return self._completed[COPIED_OUT] == self._rounds

    def progress(self) -> bool:
        """Run the next round of each stage that is ready; return whether there was one."""
        has_progressed = self._progress_copy_in()
        if self.reduces:
            has_progressed |= self._progress_reduce()
        if self.copies_out:
            has_progressed |= self._progress_copy_out()
        return has_progressed

    def _progress_copy_in(self) -> bool:
        index, buffers = self._completed[COPIED_IN], self.buffers
        number = self._first + index
        if (
            index == self._rounds
            or not buffers.is_next(COPIED_IN, number)
            # The slot is free once all ranks have copied out its previous round.
            or not buffers.is_completed_by_all(COPIED_OUT, number - SLOTS)
        ):
            return False
        self.copy_in(index, buffers.slot(self.rank, number, self.flat.dtype))
        self._complete(COPIED_IN, number)
        return True

    def _progress_reduce(self) -> bool:
        index, buffers = self._completed[REDUCED], self.buffers
        number = self._first + index
        if (
            index == self._completed[COPIED_IN]
            or not buffers.is_next(REDUCED, number)
            or (not self.copies_out and not buffers.is_next(COPIED_OUT, number))
            or not buffers.is_completed_by_all(COPIED_IN, number)
        ):
            return False
        self.reduce(index, self._all_slots(number))
        self._complete(REDUCED, number)
        if not self.copies_out:
            self._complete(COPIED_OUT, number)
        return True

    def _progress_copy_out(self) -> bool:
        index, buffers = self._completed[COPIED_OUT], self.buffers
        number = self._first + index
        previous = REDUCED if self.reduces else COPIED_IN
        if (
            index == self._completed[previous]
            or not buffers.is_next(COPIED_OUT, number)
            or not buffers.is_completed_by_all(previous, number)
        ):
            return False
        self.copy_out(index, self._all_slots(number))
        if not self.reduces:
            buffers.skip(REDUCED, number)
        self._complete(COPIED_OUT, number)
        return True

    def _all_slots(self, number: int) -> list[Tensor]:
        return [self.buffers.slot(rank, number, self.flat.dtype) for rank in range(self.world_size)]

    def _complete(self, stage: int, number: int) -> None:
        self._completed[stage] += 1
        self.buffers.publish(stage, number)

    def elements_per_round(self) -> int:
        """Return how many elements of a chunk fit into a slot."""
        return self.buffers.slot_bytes // self.flat.element_size()

    def elements_in_total(self) -> int:
        """Return how many elements of a chunk are transferred in all rounds."""
        return self.flat.numel()

    def part(self, index: int, rank: int) -> Tensor:
        """Return the part of the chunk of a rank that a round transfers."""
        whole = chunk(self.flat, self.world_size, rank)
        return whole[index * self.round_elements : (index + 1) * self.round_elements]

    @abstractmethod
    def copy_in(self, index: int, slot: Tensor) -> None:
        """Copy the data of a round into the slot of this rank."""

    def reduce(self, index: int, slots: Sequence[Tensor]) -> None:
        """Sum the chunk of this rank in a round over all slots."""
        raise NotImplementedError

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        """Copy the results of a round from the slots."""
        raise NotImplementedError


class Barrier:
    """A round without data: it is complete once all ranks have started it.

    A barrier takes its turn among the collectives. It has no slot to wait for, so the arrival of a
    rank is visible immediately.
    """

    def __init__(self, buffers: CollectiveBuffers) -> None:
        self._buffers, self._number = buffers, buffers.next_round
        buffers.next_round += 1
        self._has_arrived = self._has_left = self.is_complete = False

    def progress(self) -> bool:
        buffers, number, has_progressed = self._buffers, self._number, False
        if not self._has_arrived and buffers.is_next(COPIED_IN, number):
            # Leave first: then the notification of the last rank that arrives completes both.
            self._leave(buffers.skip)
            buffers.publish(COPIED_IN, number)
            self._has_arrived = has_progressed = True
        if self._has_arrived and not self._has_left:
            has_progressed |= self._leave(buffers.publish)
        if not self._has_left or self.is_complete:
            return has_progressed
        if buffers.is_completed_by_all(COPIED_IN, number):
            self.is_complete = has_progressed = True
        return has_progressed

    def _leave(self, complete: Callable[[int, int], None]) -> bool:
        """Complete the last stage, unless earlier rounds have not."""
        if not self._buffers.is_next(COPIED_OUT, self._number):
            return False
        self._buffers.skip(REDUCED, self._number)
        complete(COPIED_OUT, self._number)
        self._has_left = True
        return True


class ReduceScatter(Collective):
    """Every rank copies in all other chunks and reduces its own."""

    copies_out = False

    def elements_per_round(self) -> int:
        return super().elements_per_round() // self.world_size

    def elements_in_total(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, index: int, slot: Tensor) -> None:
        for rank in range(self.world_size):
            if rank != self.rank:
                part = self.part(index, rank)
                memcpy(self._within(slot, rank, part.numel()), part)

    def reduce(self, index: int, slots: Sequence[Tensor]) -> None:
        own = self.part(index, self.rank)
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                own.add_(self._within(slot, self.rank, own.numel()))
        if self.copies_out:
            memcpy(self._within(slots[self.rank], self.rank, own.numel()), own)

    def _within(self, slot: Tensor, rank: int, elements: int) -> Tensor:
        """Return where a slot holds the chunk of a rank."""
        return slot[rank * self.round_elements : rank * self.round_elements + elements]


class TwoShotAllReduce(ReduceScatter):
    """A reduce-scatter whose results all ranks copy out."""

    copies_out = True

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                part = self.part(index, rank)
                memcpy(part, self._within(slot, rank, part.numel()))


class OneShotAllReduce(Collective):
    """Every rank sums everything: one stage less, but more reads with three or more ranks."""

    reduces = False

    def copy_in(self, index: int, slot: Tensor) -> None:
        memcpy(slot, self.part(index))

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        part = self.part(index)
        if self.world_size == 2:
            part.add_(slots[1 - self.rank][: part.numel()])
        else:
            _sum([slot[: part.numel()] for slot in slots], part)

    def part(self, index: int, rank: int = 0) -> Tensor:
        return self.flat[index * self.round_elements : (index + 1) * self.round_elements]


class AllGather(Collective):
    """Every rank copies in its own chunk and copies out all others."""

    reduces = False

    def elements_in_total(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, index: int, slot: Tensor) -> None:
        memcpy(slot, self.part(index, self.rank))

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                memcpy(self.part(index, rank), slot)


class Broadcast(Collective):
    """The root copies in the tensor and all other ranks copy it out."""

    reduces = False

    def __init__(self, buffers: CollectiveBuffers, flat: Tensor, root: int) -> None:
        super().__init__(buffers, flat)
        self._root = root

    def copy_in(self, index: int, slot: Tensor) -> None:
        if self.rank == self._root:
            memcpy(slot, self.part(index))

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        if self.rank != self._root:
            memcpy(self.part(index), slots[self._root])

    def part(self, index: int, rank: int = 0) -> Tensor:
        return self.flat[index * self.round_elements : (index + 1) * self.round_elements]


class PeerViews(NamedTuple):
    """The same slice of the tensors of all ranks in symmetric memory."""

    tensors: list[Tensor]
    """By rank."""
    begin: int
    descriptors: memoryview
    """By rank and slot, a cache line that describes the slice that the rank reduces."""


class SymmetricMemory:
    """A segment with one tensor of the same size and dtype per rank.

    Creating it is collective. Raises RunError if ranks request different sizes.
    """

    def __init__(self, communicator: Communicator, elements: int, dtype: torch.dtype) -> None:
        world_size = communicator.world_size
        _check_equal_sizes(elements * dtype.itemsize, communicator)
        descriptors_bytes = world_size * SLOTS * CACHE_LINE_BYTES
        (*begins, descriptors), size_bytes = aligned_offsets(
            [*[elements * dtype.itemsize] * world_size, descriptors_bytes]
        )
        segment = SharedSegment(communicator, size_bytes)
        self._tensors = [segment.tensor(begin, elements, dtype) for begin in begins]
        self._descriptors = segment.integers(descriptors, descriptors_bytes)
        self.own = self._tensors[communicator.rank]

    def peer_views(self, tensor: Tensor) -> PeerViews | None:
        """Return the same slice on all ranks; None if `tensor` is not a slice of `own`."""
        own = self.own
        begin_byte = tensor.data_ptr() - own.data_ptr()
        is_inside = 0 <= begin_byte <= own.nbytes - tensor.nbytes
        if not is_inside or tensor.dtype != own.dtype or not tensor.is_contiguous():
            return None
        begin = begin_byte // own.element_size()
        tensors = [each[begin : begin + tensor.numel()] for each in self._tensors]
        return PeerViews(tensors, begin, self._descriptors)


def _check_equal_sizes(size_bytes: int, communicator: Communicator) -> None:
    sizes = gather_scalars(communicator, torch.tensor(size_bytes)).tolist()
    if min(sizes) < max(sizes):
        raise RunError(
            f"zeros: rank {sizes.index(max(sizes))} requests {max(sizes):,} bytes and rank"
            f" {sizes.index(min(sizes))} requests {min(sizes):,}: all ranks must request the same"
            " size"
        )


class InPlaceAllReduce(Collective):
    """An all-reduce of slices of symmetric memory: one round of any size, without slots."""

    def __init__(self, buffers: CollectiveBuffers, views: PeerViews) -> None:
        self._views = views
        super().__init__(buffers, views.tensors[buffers.rank])
        # Includes the round, because a rank that reduces another tensor leaves an old descriptor.
        self._descriptor = [self._first, views.begin, self.flat.numel()]

    def elements_in_total(self) -> int:
        return 1

    def copy_in(self, index: int, slot: Tensor) -> None:
        """Describe the slice; peers read the data in place."""
        for position, value in enumerate(self._descriptor, self._descriptor_begin(self.rank)):
            self._views.descriptors[position] = value

    def _descriptor_begin(self, rank: int) -> int:
        return (rank * SLOTS + self._first % SLOTS) * INTEGERS_PER_LINE

    def _check_equal_slices(self) -> None:
        for rank in range(self.world_size):
            begin = self._descriptor_begin(rank)
            end = begin + len(self._descriptor)
            if self._views.descriptors[begin:end].tolist() != self._descriptor:
                raise RunError(
                    f"all_reduce: ranks {self.rank} and {rank} reduce different slices of their"
                    " zeros tensors: all ranks must pass the same slice, in the same order"
                )

    def reduce(self, index: int, slots: Sequence[Tensor]) -> None:
        self._check_equal_slices()
        chunks = [chunk(tensor, self.world_size, self.rank) for tensor in self._views.tensors]
        step = CACHED_BYTES // self.flat.element_size()
        for begin in range(0, chunks[0].numel(), step):
            parts = [each[begin : begin + step] for each in chunks]
            own = parts[self.rank]
            # The own part, which holds the sum, is read first; the others in rank order.
            _sum([own, *(part for part in parts if part is not own)], own)
            for part in parts:
                if part is not own:
                    memcpy(part, own)

    def copy_out(self, index: int, slots: Sequence[Tensor]) -> None:
        """Do nothing: peers have written their sums to this rank's tensor."""


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum in order; `total` may be the first part or none of them."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
