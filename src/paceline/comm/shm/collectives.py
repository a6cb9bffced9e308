"""Collectives over shared memory: every worker has an outbox that all the others read.

A collective goes through the outboxes in pieces, each in up to three stages:

- post: copy what the others need of this worker's tensor into its outbox;
- reduce: once all have posted, sum this worker's own chunk over all outboxes, into its own;
- take: once all have reduced, copy their chunks from their outboxes to where they belong.

So worker i reduces chunk i for everybody. Every worker has a line of counters that only it writes,
which say how many pieces it has been through in each stage; so it goes through each stage in their
order, even where several collectives are under way. An outbox holds a few pieces, so that
the stages of neighbouring pieces overlap; and no more, so that what one worker posts is still in a
cache when the others read it. Small tensors skip the middle stage: everybody posts everything and
sums for itself, in the order of the ranks, so that all get the same bits.

Tensors that the workers of a host sum where they lie, since everybody sees everybody's.

Worker i sums chunk i over all workers' tensors and writes it back into all of them. So every byte
is read and written once, as in a plain copy, and nothing goes through an outbox."""

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

PIECES = 2
"""How many an outbox holds."""
POSTED, REDUCED, TAKEN = range(3)
COUNTERS_A_LINE = CACHE_LINE_BYTES // 8


class CollectiveBuffers:
    """Those of all workers, as `rank` sees them."""

    def __init__(
        self,
        arena: SharedSegment,
        begin_byte: int,
        rank: int,
        world_size: int,
        piece_bytes: int,
        call_peers: Callable[[], None],
    ) -> None:
        """`call_peers` is for those that wait for everybody to be through a stage."""
        self.rank, self.world_size, self.piece_bytes = rank, world_size, piece_bytes
        self._call_peers = call_peers
        self.next_piece = 0
        """Pieces are numbered over all collectives, which every worker begins in the same order."""
        lines_bytes = world_size * CACHE_LINE_BYTES
        self._counters = arena.integers(begin_byte, lines_bytes)
        self._memory = arena.tensor(
            begin_byte + lines_bytes, world_size * PIECES * piece_bytes, torch.uint8
        )
        self._own_line = rank * COUNTERS_A_LINE
        self._lines = [each * COUNTERS_A_LINE for each in range(world_size)]
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    @staticmethod
    def size_bytes(world_size: int, piece_bytes: int) -> int:
        return world_size * (CACHE_LINE_BYTES + PIECES * piece_bytes)

    def piece(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """Where a rank posts a piece."""
        slot = rank * PIECES + number % PIECES
        key = (rank, number % PIECES, dtype)
        if key not in self._views:
            begin = slot * self.piece_bytes
            self._views[key] = self._memory[begin : begin + self.piece_bytes].view(dtype)
        return self._views[key]

    def is_next(self, stage: int, number: int) -> bool:
        """Whether this rank has been through a stage with all pieces before this one."""
        return self._counters[self._own_line + stage] == number

    def skip(self, stage: int, number: int) -> None:
        """Be past a stage that a piece does not have, and nobody waits for."""
        self._counters[self._own_line + stage] = number + 1

    def publish(self, stage: int, number: int) -> None:
        self._counters[self._own_line + stage] = number + 1
        # Who waits does so for everybody, and so is woken once, by the last. Of two that come at
        # the same moment, one at least sees the other.
        memory_fence()
        if self.is_everybody_past(stage, number):
            self._call_peers()

    def is_everybody_past(self, stage: int, number: int) -> bool:
        """Whether all have been through a stage with a piece, this rank included."""
        counters = self._counters
        for line in self._lines:  # noqa: SIM110 - this is looked at while spinning
            if counters[line + stage] <= number:
                return False
        return True


class Collective(ABC):
    """One operation on a flat tensor, as far as it can go without waiting."""

    reduces: ClassVar[bool] = True
    """Whether it has the stage in the middle; likewise the last."""
    takes: ClassVar[bool] = True

    def __init__(self, boxes: CollectiveBuffers, flat: Tensor) -> None:
        self.boxes, self.flat = boxes, flat
        self.rank, self.world_size = boxes.rank, boxes.world_size
        self.room = self.elements_at_once()
        self._count = max(1, -(-self.elements_in_turn() // self.room))
        self._first = boxes.next_piece
        boxes.next_piece += self._count
        self._done = [0, 0, 0]
        """Pieces through each of the stages."""

    @property
    def is_complete(self) -> bool:
        return self._done[TAKEN] == self._count

    def progress(self) -> bool:
        """Each stage with its next piece, if the others are far enough; whether any was."""
        moved = self._advance_post()
        if self.reduces:
            moved |= self._advance_reduce()
        if self.takes:
            moved |= self._advance_take()
        return moved

    def _advance_post(self) -> bool:
        index, boxes = self._done[POSTED], self.boxes
        number = self._first + index
        if (
            index == self._count
            or not boxes.is_next(POSTED, number)
            # The outbox is free again once all have taken what was there before.
            or not boxes.is_everybody_past(TAKEN, number - PIECES)
        ):
            return False
        self.copy_in(index, boxes.piece(self.rank, number, self.flat.dtype))
        self._finish(POSTED, number)
        return True

    def _advance_reduce(self) -> bool:
        index, boxes = self._done[REDUCED], self.boxes
        number = self._first + index
        if (
            index == self._done[POSTED]
            or not boxes.is_next(REDUCED, number)
            or (not self.takes and not boxes.is_next(TAKEN, number))
            or not boxes.is_everybody_past(POSTED, number)
        ):
            return False
        self.reduce(index, self._all_boxes(number))
        self._finish(REDUCED, number)
        if not self.takes:
            self._finish(TAKEN, number)
        return True

    def _advance_take(self) -> bool:
        index, boxes = self._done[TAKEN], self.boxes
        number = self._first + index
        ready = REDUCED if self.reduces else POSTED
        if (
            index == self._done[ready]
            or not boxes.is_next(TAKEN, number)
            or not boxes.is_everybody_past(ready, number)
        ):
            return False
        self.copy_out(index, self._all_boxes(number))
        if not self.reduces:
            boxes.skip(REDUCED, number)
        self._finish(TAKEN, number)
        return True

    def _all_boxes(self, number: int) -> list[Tensor]:
        return [self.boxes.piece(rank, number, self.flat.dtype) for rank in range(self.world_size)]

    def _finish(self, stage: int, number: int) -> None:
        self._done[stage] += 1
        self.boxes.publish(stage, number)

    def elements_at_once(self) -> int:
        """How many elements of a chunk a piece has room for."""
        return self.boxes.piece_bytes // self.flat.element_size()

    def elements_in_turn(self) -> int:
        """The elements that go through one outbox, piece by piece."""
        return self.flat.numel()

    def part(self, index: int, of: int) -> Tensor:
        """What of a chunk belongs to a piece."""
        whole = chunk(self.flat, self.world_size, of)
        return whole[index * self.room : (index + 1) * self.room]

    @abstractmethod
    def copy_in(self, index: int, box: Tensor) -> None:
        """Put a piece into this rank's outbox."""

    def reduce(self, index: int, boxes: Sequence[Tensor]) -> None:
        """Sum this rank's chunk of a piece into its outbox."""
        raise NotImplementedError

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        """Copy the others' chunks of a piece from their outboxes."""
        raise NotImplementedError


class Barrier:
    """Nothing to be moved: everybody has come. So who comes is seen at once, and need not wait.

    It takes its turn among the collectives, as a piece of which nothing is posted or taken.
    """

    def __init__(self, boxes: CollectiveBuffers) -> None:
        self._boxes, self._number = boxes, boxes.next_piece
        boxes.next_piece += 1
        self._has_come = self._has_gone = self.is_complete = False

    def progress(self) -> bool:
        boxes, number, moved = self._boxes, self._number, False
        if not self._has_come and boxes.is_next(POSTED, number):
            # There is nothing to take, so who comes last lets everybody go with the same call.
            self._leave(boxes.skip)
            boxes.publish(POSTED, number)
            self._has_come = moved = True
        if self._has_come and not self._has_gone:
            moved |= self._leave(boxes.publish)
        if self._has_gone and not self.is_complete and boxes.is_everybody_past(POSTED, number):
            self.is_complete = moved = True
        return moved

    def _leave(self, be_past: Callable[[int, int], None]) -> bool:
        """Be past the last stage, unless earlier pieces are not."""
        if not self._boxes.is_next(TAKEN, self._number):
            return False
        self._boxes.skip(REDUCED, self._number)
        be_past(TAKEN, self._number)
        self._has_gone = True
        return True


class ReduceScatter(Collective):
    takes = False

    def elements_at_once(self) -> int:
        return super().elements_at_once() // self.world_size

    def elements_in_turn(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, index: int, box: Tensor) -> None:
        for rank in range(self.world_size):
            if rank != self.rank:
                part = self.part(index, rank)
                memcpy(self._within(box, rank, part.numel()), part)

    def reduce(self, index: int, boxes: Sequence[Tensor]) -> None:
        own = self.part(index, self.rank)
        for rank, box in enumerate(boxes):
            if rank != self.rank:
                own.add_(self._within(box, self.rank, own.numel()))
        if self.takes:
            memcpy(self._within(boxes[self.rank], self.rank, own.numel()), own)

    def _within(self, box: Tensor, rank: int, elements: int) -> Tensor:
        """Where the chunk of a rank lies in an outbox."""
        return box[rank * self.room : rank * self.room + elements]


class TwoShotAllReduce(ReduceScatter):
    takes = True

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        for rank, box in enumerate(boxes):
            if rank != self.rank:
                part = self.part(index, rank)
                memcpy(part, self._within(box, rank, part.numel()))


class OneShotAllReduce(Collective):
    """Everybody sums everything: one meeting less, and more to be read from three workers on."""

    reduces = False

    def copy_in(self, index: int, box: Tensor) -> None:
        part = self.part(index)
        memcpy(box, part)

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        part = self.part(index)
        if self.world_size == 2:
            part.add_(boxes[1 - self.rank][: part.numel()])
        else:
            add_up([box[: part.numel()] for box in boxes], part)

    def part(self, index: int, of: int = 0) -> Tensor:
        return self.flat[index * self.room : (index + 1) * self.room]


class AllGather(Collective):
    reduces = False

    def elements_in_turn(self) -> int:
        return chunk_elements(self.flat.numel(), self.world_size, 0)

    def copy_in(self, index: int, box: Tensor) -> None:
        memcpy(box, self.part(index, self.rank))

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        for rank, box in enumerate(boxes):
            if rank != self.rank:
                memcpy(self.part(index, rank), box)


class Broadcast(Collective):
    reduces = False

    def __init__(self, boxes: CollectiveBuffers, flat: Tensor, root: int) -> None:
        super().__init__(boxes, flat)
        self._root = root

    def copy_in(self, index: int, box: Tensor) -> None:
        if self.rank == self._root:
            memcpy(box, self.part(index, 0))

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        if self.rank != self._root:
            memcpy(self.part(index, 0), boxes[self._root])

    def part(self, index: int, of: int) -> Tensor:
        return self.flat[index * self.room : (index + 1) * self.room]


def add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """In order; the total may be the first of them, or none."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total.add_(part)


CACHED_BYTES = 256 * 1024
"""Summed at once, so that the sum is still in a cache when it is written to the others."""
NUMBERS_A_LINE = CACHE_LINE_BYTES // 8


class Part(NamedTuple):
    """The same part of everybody's block."""

    tensors: list[Tensor]
    begin: int
    notes: memoryview
    """Of the blocks: for each worker and piece under way, a line that says what it sums."""


class SymmetricMemory:
    """Equal blocks of one arena, one a worker. Collective; `RunError` where they are not equal."""

    def __init__(self, communicator: Communicator, elements: int, dtype: torch.dtype) -> None:
        world_size = communicator.world_size
        _check_that_all_ask_for(elements * dtype.itemsize, communicator)
        notes_bytes = world_size * PIECES * CACHE_LINE_BYTES
        (*begins, notes), size_bytes = aligned_offsets(
            [*[elements * dtype.itemsize] * world_size, notes_bytes]
        )
        arena = SharedSegment(communicator, size_bytes)
        self._all = [arena.tensor(begin, elements, dtype) for begin in begins]
        self._notes = arena.integers(notes, notes_bytes)
        self.own = self._all[communicator.rank]

    def peer_views(self, tensor: Tensor) -> Part | None:
        """Where each worker has what lies in this worker's block; None if the tensor does not."""
        own = self.own
        begin_byte = tensor.data_ptr() - own.data_ptr()
        is_inside = 0 <= begin_byte <= own.nbytes - tensor.nbytes
        if not is_inside or tensor.dtype != own.dtype or not tensor.is_contiguous():
            return None
        begin = begin_byte // own.element_size()
        tensors = [block[begin : begin + tensor.numel()] for block in self._all]
        return Part(tensors, begin, self._notes)


def _check_that_all_ask_for(size_bytes: int, communicator: Communicator) -> None:
    asked = gather_scalars(communicator, torch.tensor(size_bytes)).tolist()
    if min(asked) < max(asked):
        raise RunError(
            f"zeros: rank {asked.index(max(asked))} asks for {max(asked):,} bytes and rank"
            f" {asked.index(min(asked))} for {min(asked):,}: all ranks are to ask for the same"
        )


class AllReduceInPlace(Collective):
    """As one piece, whatever its size: it takes no room in an outbox."""

    def __init__(self, boxes: CollectiveBuffers, part: Part) -> None:
        self._part = part
        super().__init__(boxes, part.tensors[boxes.rank])
        # With the piece's number, since a rank that sums something else leaves an old note here.
        self._note = [self._first, part.begin, self.flat.numel()]

    def elements_in_turn(self) -> int:
        return 1

    def copy_in(self, index: int, box: Tensor) -> None:
        """It is where the others read it; which part it is, they are told."""
        for place, number in enumerate(self._note, self._place(self.rank)):
            self._part.notes[place] = number

    def _place(self, rank: int) -> int:
        """Of a rank's note on this piece."""
        return (rank * PIECES + self._first % PIECES) * NUMBERS_A_LINE

    def _check_that_all_sum_the_same(self) -> None:
        for rank in range(self.world_size):
            place = self._place(rank)
            if self._part.notes[place : place + len(self._note)].tolist() != self._note:
                raise RunError(
                    f"all_reduce: ranks {self.rank} and {rank} sum different parts of what zeros"
                    " gave them: all ranks are to give the same part, in the same order"
                )

    def reduce(self, index: int, boxes: Sequence[Tensor]) -> None:
        self._check_that_all_sum_the_same()
        chunks = [chunk(tensor, self.world_size, self.rank) for tensor in self._part.tensors]
        step = CACHED_BYTES // self.flat.element_size()
        for begin in range(0, chunks[0].numel(), step):
            parts = [each[begin : begin + step] for each in chunks]
            own = parts[self.rank]
            # In the order of the ranks, but for the first to be read, which is where the sum lies.
            add_up([own, *(part for part in parts if part is not own)], own)
            for part in parts:
                if part is not own:
                    memcpy(part, own)

    def copy_out(self, index: int, boxes: Sequence[Tensor]) -> None:
        """The others have written it here."""
