"""The operations of process groups: their names, and what their arguments mean."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm import communicator
from paceline.profiler.collectives.log import OPERATIONS, Counts


@dataclass(frozen=True)
class Operation:
    name: str
    op: str
    """Name of the operator in namespace c10d of the dispatcher."""
    methods: tuple[str, ...]
    """Names in process groups."""
    tensors: int | None
    """Position of the argument whose bytes are counted, in both."""
    is_part: bool = False
    """Whether that argument is one rank's part of the whole tensor."""
    blocks: bool = False
    """Whether the operator itself waits."""

    @functools.cached_property
    def code(self) -> int:
        return OPERATIONS.index(self.name)

    @functools.cached_property
    def is_message(self) -> bool:
        return self.name in ("send", "recv")

    def measure(self, args: tuple[Any, ...]) -> tuple[Tensor | None, int]:
        """The first tensor of the argument, and the bytes of all of them."""
        if self.tensors is None:
            return None, 0
        tensors = args[self.tensors]
        if type(tensors) is list and len(tensors) == 1:
            tensors = tensors[0]
        if isinstance(tensors, Tensor) and tensors.layout is torch.strided:
            return tensors, tensors.nbytes
        size_bytes = _nbytes(tensors)
        while not isinstance(tensors, Tensor):
            if not tensors:
                return None, 0
            tensors = tensors[0]
        return tensors, size_bytes

    def peer(self, args: tuple[Any, ...]) -> int:
        """The root, or the other rank of a message, in a call of a method; -1 if there is none."""
        if self.is_message:
            return -1 if self.op == "recv_any_source_" else int(args[1])
        return next((int(each.rootRank) for each in args if hasattr(each, "rootRank")), -1)


ALL = (
    Operation("all_reduce", "allreduce_", ("allreduce",), 0),
    Operation("all_reduce", "allreduce_coalesced_", ("allreduce_coalesced",), 0),
    Operation("broadcast", "broadcast_", ("broadcast",), 0),
    Operation("all_gather", "allgather_", ("allgather",), 1, is_part=True),
    Operation("all_gather", "_allgather_base_", ("all_gather_single", "_allgather_base"), 0),
    Operation("all_gather", "allgather_coalesced_", ("allgather_coalesced",), 1, is_part=True),
    Operation(
        "all_gather",
        "allgather_into_tensor_coalesced_",
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        0,
    ),
    Operation("reduce_scatter", "reduce_scatter_", ("reduce_scatter",), 0, is_part=True),
    Operation(
        "reduce_scatter",
        "_reduce_scatter_base_",
        ("reduce_scatter_single", "_reduce_scatter_base"),
        1,
    ),
    Operation(
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced_",
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        1,
    ),
    Operation("barrier", "barrier", ("barrier",), None),
    Operation("barrier", "monitored_barrier_", ("monitored_barrier",), None, blocks=True),
    Operation("reduce", "reduce_", ("reduce",), 0),
    Operation("gather", "gather_", ("gather",), 1, is_part=True),
    Operation("scatter", "scatter_", ("scatter",), 0, is_part=True),
    Operation("all_to_all", "alltoall_", ("alltoall",), 1),
    Operation("all_to_all", "alltoall_base_", ("all_to_all_single", "alltoall_base"), 1),
    Operation("send", "send", ("send",), 0),
    Operation("recv", "recv_", ("recv",), 0),
    Operation("recv", "recv_any_source_", ("recv_anysource",), 0),
)

METHODS = sorted({name for operation in ALL for name in operation.methods})

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@functools.lru_cache(4096)
def transfer_counts(
    name: str, size_bytes: int, element_bytes: int, rank: int, world_size: int, peer: int
) -> Counts:
    """What a rank of the group transfers, by the formulas that `paceline train` uses.

    Which algorithm a process group uses is unknown: they are those of rings and trees.
    """
    if name == "send":
        return Counts(bytes_sent=size_bytes, messages=1)
    if name == "recv":
        return Counts(bytes_received=size_bytes)
    if world_size == 1 or not size_bytes:
        return Counts()
    elements = size_bytes // element_bytes
    tensor = torch.empty(elements, dtype=_DTYPES.get(element_bytes, torch.uint8), device="meta")
    others = world_size - 1
    match name:
        case "all_reduce":
            return Counts(**communicator.all_reduce_counts(tensor, rank, world_size))
        case "reduce_scatter":
            return Counts(**communicator.reduce_scatter_counts(tensor, rank, world_size))
        case "all_gather":
            return Counts(**communicator.all_gather_counts(tensor, rank, world_size))
        case "broadcast":
            return Counts(**communicator.broadcast_counts(tensor, rank, world_size, peer))
        case "reduce":
            # The tree of the broadcast in the other direction.
            counts = communicator.broadcast_counts(tensor, rank, world_size, peer)
            return Counts(
                counts["bytes_received"], counts["bytes_sent"], int(counts["bytes_received"] > 0)
            )
        case "gather" | "scatter":
            share = size_bytes // world_size
            whole, part = (others * share, 0) if rank == peer else (0, share)
            if name == "scatter":
                return Counts(whole, part, others if whole else 0)
            return Counts(part, whole, 1 if part else 0)
        case "all_to_all":
            share = size_bytes // world_size
            return Counts(others * share, others * share, others)
    return Counts()


def _nbytes(tensors: Any) -> int:
    """Bytes of a tensor, or of all tensors of a nested list."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes if tensors.layout is torch.strided else 0
    return sum(_nbytes(each) for each in tensors)
