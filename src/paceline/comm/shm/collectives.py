"""Shared-memory collectives, implemented as non-blocking state machines.

Every rank has a buffer of two slots that all other ranks can read. A collective runs in rounds, and
each round transfers as much of the tensor as fits into a slot, in up to three stages:

- copy in: copy what the other ranks need into the slot of this rank;
- reduce: once all ranks have copied in, sum this rank's chunk over all slots into its own slot;
- copy out: once all ranks have reduced, copy their chunks from their slots.

Rank i reduces chunk i. Each rank writes only its own cache line of counters, which hold the number
of rounds that it has completed in each stage. Rounds are numbered across all collectives, and a
rank completes each stage in that order even if several collectives are in progress. With two slots,
the stages of successive rounds overlap, and the slots are small enough to stay in the cache until
the other ranks read them. Small tensors skip the reduce stage: every rank copies in the whole
tensor and sums all slots itself, in rank order, so that results are bitwise identical on all ranks.

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
from paceline.comm.objects import all_gather_scalars
from paceline.comm.shm.futex import memory_fence
from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment, aligned_offsets
from paceline.errors import RunError

SLOTS = 2
"""Number of slots per rank."""
STAGES = 3
COPIED_IN, REDUCED, COPIED_OUT = range(STAGES)
"""Stages; the value is the index of the stage's counter."""
INTEGERS_PER_LINE = CACHE_LINE_BYTES // 8
IN_PLACE_STEP_BYTES = 256 * 1024
"""Bytes per step of an in-place sum; they stay in the cache until all ranks have them."""


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
        memory: Sequence[Tensor] | None = None,
    ) -> None:
        """`notify_all` wakes the ranks that are waiting for all ranks to complete a stage.

        `memory` holds the bytes of each rank's slots; by default, they are in the segment.
        """
        self.rank, self.world_size, self.slot_bytes = rank, world_size, slot_bytes
        self._notify_all = notify_all
        self.next_round = 0
        """The number of the next round; all ranks start the same collectives in the same order."""
        lines_bytes = world_size * CACHE_LINE_BYTES
        self._counters = segment.integers(begin_byte, lines_bytes)
        rank_bytes = SLOTS * slot_bytes
        self._memory = memory or [
            segment.tensor(begin_byte + lines_bytes + each * rank_bytes, rank_bytes, torch.uint8)
            for each in range(world_size)
        ]
        self._own_line = rank * INTEGERS_PER_LINE
        self._lines = [each * INTEGERS_PER_LINE for each in range(world_size)]
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @staticmethod
    def size_bytes(world_size: int, slot_bytes: int) -> int:
        return world_size * (CACHE_LINE_BYTES + SLOTS * slot_bytes)

    def slot(self, rank: int, round_number: int, dtype: torch.dtype) -> Tensor:
        """Return the slot of a rank for a round."""
        key = (rank, round_number % SLOTS, dtype)
        if key not in self._views:
            begin = round_number % SLOTS * self.slot_bytes
            self._views[key] = self._memory[rank][begin : begin + self.slot_bytes].view(dtype)
        return self._views[key]

    def forget_slots(self) -> None:
        """Drop the views of the slots, so that their memory can be released."""
        self._views.clear()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between flat tensors, up to the size of the smaller one."""
        memcpy(target, source)

    def acquire(self, stage: int, round_number: int) -> None:
        """Order the next work behind a stage that all ranks have completed.

        On a CPU, work is done when a call returns.
        """

    def is_next(self, stage: int, round_number: int) -> bool:
        """Return whether this rank has completed a stage of all rounds before this one."""
        return self._counters[self._own_line + stage] == round_number

    def skip(self, stage: int, round_number: int) -> None:
        """Mark a stage that a round does not have as complete. No rank waits for it."""
        self._counters[self._own_line + stage] = round_number + 1

    def publish(self, stage: int, round_number: int) -> None:
        """Complete a stage of a round, and wake the peers if this rank is the last to do so."""
        self._counters[self._own_line + stage] = round_number + 1
        # Waiting ranks wait for all ranks, so only the last rank wakes them. The fence guarantees
        # that if two ranks publish at the same time, at least one sees the other's counter.
        memory_fence()
        if self.is_completed_by_all(stage, round_number):
            self._notify_all()

    def is_completed_by_all(self, stage: int, round_number: int) -> bool:
        """Return whether all ranks have completed a stage of a round."""
        counters = self._counters
        for line in self._lines:  # noqa: SIM110 - runs while spinning, where any() is slower
            if counters[line + stage] <= round_number:
                return False
        return True


class Collective(ABC):
    """An operation on a flat tensor that makes as much progress as possible without blocking."""

    has_reduce_stage: ClassVar[bool] = True
    has_copy_out_stage: ClassVar[bool] = True

    def __init__(self, buffers: CollectiveBuffers, flat: Tensor) -> None:
        self.buffers, self.flat = buffers, flat
        self.rank, self.world_size = buffers.rank, buffers.world_size
        self.round_elements = self.elements_per_round()
        self._rounds = max(1, -(-self.total_elements() // self.round_elements))
        self._first = buffers.next_round
        buffers.next_round += self._rounds
        self._completed = [0, 0, 0]
        """Rounds completed in each stage."""

    @property
    def is_complete(self) -> bool:
        return self._completed[COPIED_OUT] == self._rounds

    def progress(self) -> bool:
        """Run the next round of each stage that is ready; return whether any stage was ready."""
        has_progressed = self._progress_copy_in()
        if self.has_reduce_stage:
            has_progressed |= self._progress_reduce()
        if self.has_copy_out_stage:
            has_progressed |= self._progress_copy_out()
        return has_progressed

    def _progress_copy_in(self) -> bool:
        round_index, buffers = self._completed[COPIED_IN], self.buffers
        round_number = self._first + round_index
        if (
            round_index == self._rounds
            or not buffers.is_next(COPIED_IN, round_number)
            # The slot is free once all ranks have copied out its previous round.
            or not buffers.is_completed_by_all(COPIED_OUT, round_number - SLOTS)
        ):
            return False
        buffers.acquire(COPIED_OUT, round_number - SLOTS)
        self.copy_in(round_index, buffers.slot(self.rank, round_number, self.flat.dtype))
        self._complete(COPIED_IN, round_number)
        return True

    def _progress_reduce(self) -> bool:
        round_index, buffers = self._completed[REDUCED], self.buffers
        round_number = self._first + round_index
        if (
            round_index == self._completed[COPIED_IN]
            or not buffers.is_next(REDUCED, round_number)
            or (not self.has_copy_out_stage and not buffers.is_next(COPIED_OUT, round_number))
            or not buffers.is_completed_by_all(COPIED_IN, round_number)
        ):
            return False
        buffers.acquire(COPIED_IN, round_number)
        self.reduce(round_index, self._all_slots(round_number))
        self._complete(REDUCED, round_number)
        if not self.has_copy_out_stage:
            self._complete(COPIED_OUT, round_number)
        return True

    def _progress_copy_out(self) -> bool:
        round_index, buffers = self._completed[COPIED_OUT], self.buffers
        round_number = self._first + round_index
        previous = REDUCED if self.has_reduce_stage else COPIED_IN
        if (
            round_index == self._completed[previous]
            or not buffers.is_next(COPIED_OUT, round_number)
            or not buffers.is_completed_by_all(previous, round_number)
        ):
            return False
        buffers.acquire(previous, round_number)
        self.copy_out(round_index, self._all_slots(round_number))
        if not self.has_reduce_stage:
            buffers.skip(REDUCED, round_number)
        self._complete(COPIED_OUT, round_number)
        return True

    def _all_slots(self, round_number: int) -> list[Tensor]:
        return [
            self.buffers.slot(rank, round_number, self.flat.dtype)
            for rank in range(self.world_size)
        ]

    def _complete(self, stage: int, round_number: int) -> None:
        self._completed[stage] += 1
        self.buffers.publish(stage, round_number)

    def elements_per_round(self) -> int:
        """Return how many elements of a chunk fit into a slot."""
        return self.buffers.slot_bytes // self.flat.element_size()

    def total_elements(self) -> int:
        """Return how many elements of a chunk are transferred in all rounds."""
        return self.flat.numel()

    def part(self, round_index: int, rank: int) -> Tensor:
        """Return the part of a rank's chunk that a round transfers."""
        whole = chunk(self.flat, self.world_size, rank)
        return whole[round_index * self.round_elements : (round_index + 1) * self.round_elements]

    @abstractmethod
    def copy_in(self, round_index: int, slot: Tensor) -> None:
        """Copy the data of a round into the slot of this rank."""

    def reduce(self, round_index: int, slots: Sequence[Tensor]) -> None:
        """Sum this rank's part of a round over all slots."""
        raise NotImplementedError

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        """Copy the results of a round from the slots."""
        raise NotImplementedError


class Barrier:
    """A round without data: it is complete once all ranks have started it.

    A barrier is ordered with the other collectives. It has no slot to wait for, so the arrival of a
    rank is visible immediately.
    """

    def __init__(self, buffers: CollectiveBuffers) -> None:
        self._buffers, self._round_number = buffers, buffers.next_round
        buffers.next_round += 1
        self._has_arrived = self._has_left = self.is_complete = False

    def progress(self) -> bool:
        buffers, round_number, has_progressed = self._buffers, self._round_number, False
        if not self._has_arrived and buffers.is_next(COPIED_IN, round_number):
            # Leave before arriving, so that a single notification from the last rank to arrive
            # completes both stages.
            self._leave(buffers.skip)
            buffers.publish(COPIED_IN, round_number)
            self._has_arrived = has_progressed = True
        if self._has_arrived and not self._has_left:
            has_progressed |= self._leave(buffers.publish)
        if not self._has_left or self.is_complete:
            return has_progressed
        if buffers.is_completed_by_all(COPIED_IN, round_number):
            self.is_complete = has_progressed = True
        return has_progressed

    def _leave(self, complete: Callable[[int, int], None]) -> bool:
        """Complete the last stage if all earlier rounds have; return whether it was completed."""
        if not self._buffers.is_next(COPIED_OUT, self._round_number):
            return False
        self._buffers.skip(REDUCED, self._round_number)
        complete(COPIED_OUT, self._round_number)
        self._has_left = True
        return True


class ReduceScatter(Collective):
    """Every rank copies in all other chunks and reduces its own."""

    has_copy_out_stage = False

    def elements_per_round(self) -> int:
        return super().elements_per_round() // self.world_size

    def total_elements(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, round_index: int, slot: Tensor) -> None:
        for rank in range(self.world_size):
            if rank != self.rank:
                part = self.part(round_index, rank)
                self.buffers.copy(self._chunk_view(slot, rank, part.numel()), part)

    def reduce(self, round_index: int, slots: Sequence[Tensor]) -> None:
        own = self.part(round_index, self.rank)
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                own.add_(self._chunk_view(slot, self.rank, own.numel()))
        if self.has_copy_out_stage:
            self.buffers.copy(self._chunk_view(slots[self.rank], self.rank, own.numel()), own)

    def _chunk_view(self, slot: Tensor, rank: int, elements: int) -> Tensor:
        """Return the view of a slot that holds a rank's chunk."""
        return slot[rank * self.round_elements : rank * self.round_elements + elements]


class TwoShotAllReduce(ReduceScatter):
    """A reduce-scatter whose results all ranks copy out."""

    has_copy_out_stage = True

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                part = self.part(round_index, rank)
                self.buffers.copy(part, self._chunk_view(slot, rank, part.numel()))


class OneShotAllReduce(Collective):
    """Every rank sums the whole tensor.

    This saves one stage but reads more data with three or more ranks.
    """

    has_reduce_stage = False

    def copy_in(self, round_index: int, slot: Tensor) -> None:
        self.buffers.copy(slot, self.part(round_index))

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        part = self.part(round_index)
        if self.world_size == 2:
            part.add_(slots[1 - self.rank][: part.numel()])
        else:
            _sum([slot[: part.numel()] for slot in slots], part)

    def part(self, round_index: int, rank: int = 0) -> Tensor:
        return self.flat[
            round_index * self.round_elements : (round_index + 1) * self.round_elements
        ]


class AllGather(Collective):
    """Every rank copies in its own chunk and copies out all others."""

    has_reduce_stage = False

    def total_elements(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, round_index: int, slot: Tensor) -> None:
        self.buffers.copy(slot, self.part(round_index, self.rank))

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        for rank, slot in enumerate(slots):
            if rank != self.rank:
                self.buffers.copy(self.part(round_index, rank), slot)


class Broadcast(Collective):
    """The root copies in the tensor and all other ranks copy it out."""

    has_reduce_stage = False

    def __init__(self, buffers: CollectiveBuffers, flat: Tensor, root: int) -> None:
        super().__init__(buffers, flat)
        self._root = root

    def copy_in(self, round_index: int, slot: Tensor) -> None:
        if self.rank == self._root:
            self.buffers.copy(slot, self.part(round_index))

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        if self.rank != self._root:
            self.buffers.copy(self.part(round_index), slots[self._root])

    def part(self, round_index: int, rank: int = 0) -> Tensor:
        return self.flat[
            round_index * self.round_elements : (round_index + 1) * self.round_elements
        ]


class PeerViews(NamedTuple):
    """The same slice of the tensors of all ranks in symmetric memory."""

    tensors: list[Tensor]
    """One tensor per rank."""
    begin: int
    descriptors: memoryview
    """One cache line per rank and slot, which describes the slice that the rank reduces."""


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
    sizes = all_gather_scalars(communicator, torch.tensor(size_bytes)).tolist()
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
        # The descriptor includes the round, because a rank that reduces a different tensor leaves a
        # stale descriptor.
        self._descriptor = [self._first, views.begin, self.flat.numel()]

    def total_elements(self) -> int:
        return 1

    def copy_in(self, round_index: int, slot: Tensor) -> None:
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
                    f"all_reduce: ranks {self.rank} and {rank} reduce different slices of tensors"
                    " from zeros(): all ranks must pass the same slice, in the same order"
                )

    def reduce(self, round_index: int, slots: Sequence[Tensor]) -> None:
        self._check_equal_slices()
        chunks = [chunk(tensor, self.world_size, self.rank) for tensor in self._views.tensors]
        step = IN_PLACE_STEP_BYTES // self.flat.element_size()
        for begin in range(0, chunks[0].numel(), step):
            parts = [each[begin : begin + step] for each in chunks]
            own = parts[self.rank]
            # Sum this rank's part first, because it also holds the result, then the others in rank
            # order.
            _sum([own, *(part for part in parts if part is not own)], own)
            for part in parts:
                if part is not own:
                    memcpy(part, own)

    def copy_out(self, round_index: int, slots: Sequence[Tensor]) -> None:
        """Do nothing: peers have written their sums to this rank's tensor."""


def _sum(parts: Sequence[Tensor], total: Tensor) -> None:
    """Sum in order; `total` may alias the first part but no other."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)
