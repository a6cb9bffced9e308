"""Operations of torch.distributed that a worker runs with two backends, to compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, ReduceOp  # type: ignore[attr-defined]

import paceline.backend  # noqa: F401 - registers it
from paceline.comm.communicator import Communicator
from paceline.comm.process_groups import use_interface_of
from paceline.torch_backend import process_group as group
from paceline.torch_backend.process_group import HostInfo

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
)
BITWISE = ("BAND", "BOR", "BXOR")


WAYS = ("memory", "spare cores", "hosts")
"""Host layouts: one host without spare cores, one host with spare cores, and two hosts with
alternating ranks."""


@contextmanager
def default_group(
    communicator: Communicator, file: Path, way: str = "memory"
) -> Iterator[dist.ProcessGroup]:
    """The default group of torch.distributed, on loopback, over the workers of a pool."""
    rank, world_size = communicator.rank, communicator.world_size
    cores = world_size + 1 if way == "spare cores" else world_size
    seat = replace(HostInfo.own(), cores=cores)
    if way == "hosts":
        seat = replace(seat, host=f"host {rank % 2}")
    with (
        use_interface_of("127.0.0.1"),
        mock.patch.object(HostInfo, "own", return_value=seat),
        mock.patch.object(group, "LARGE_BYTES", 1),
    ):
        store = FileStore(str(file), world_size)
        dist.init_process_group("paceline", store=store, rank=rank, world_size=world_size)
        try:
            assert dist.group.WORLD is not None
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Case:
    """Input tensors of small integers, so that sums are exact in any order."""

    group: dist.ProcessGroup
    elements: int
    dtype: torch.dtype
    is_strided: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def tensor(self, salt: int = 0, factor: int = 1) -> Tensor:
        numbers = torch.arange(self.elements * factor) * 7 + 3 * self.rank + salt
        return self._laid_out((numbers % 4).to(self.dtype))

    def empty(self, factor: int = 1) -> Tensor:
        return self._laid_out(torch.zeros(self.elements * factor, dtype=self.dtype))

    def parts(self) -> list[Tensor]:
        return [self.tensor(salt) for salt in range(self.ranks)]

    def places(self) -> list[Tensor]:
        return [self.empty() for _ in range(self.ranks)]

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if not self.is_strided:
            return tensor
        wide = tensor.new_zeros(tensor.numel(), 3)
        wide[:, 1] = tensor
        return wide[:, 1]


Operation = Callable[[Case], list[Tensor]]


def all_reduce(name: str, case: Case) -> list[Tensor]:
    tensor = case.tensor()
    dist.all_reduce(tensor, getattr(ReduceOp, name), group=case.group)
    return [tensor]


def all_reduce_later(case: Case) -> list[Tensor]:
    """Two concurrent all-reduces; the later one is waited for first."""
    first, second = case.tensor(), case.tensor(1)
    works = [dist.all_reduce(each, group=case.group, async_op=True) for each in (first, second)]
    for work in reversed(works):
        work.wait()
    return [first, second]


def broadcast(case: Case) -> list[Tensor]:
    tensors = case.parts()
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=root, group=case.group)
    return tensors


def all_gather(case: Case) -> list[Tensor]:
    places = case.places()
    dist.all_gather(places, case.tensor(), group=case.group)
    return places


def all_gather_into_tensor(case: Case) -> list[Tensor]:
    whole = torch.zeros(case.elements * case.ranks, dtype=case.dtype)
    dist.all_gather_into_tensor(whole, case.tensor(), group=case.group)
    return [whole]


def reduce_scatter(name: str, case: Case) -> list[Tensor]:
    tensor = case.empty()
    dist.reduce_scatter(tensor, case.parts(), getattr(ReduceOp, name), group=case.group)
    return [tensor]


def reduce_scatter_tensor(name: str, case: Case) -> list[Tensor]:
    tensor, whole = case.empty(), case.tensor(factor=case.ranks)
    dist.reduce_scatter_tensor(tensor, whole, getattr(ReduceOp, name), group=case.group)
    return [tensor, whole]


def reduce(case: Case) -> list[Tensor]:
    tensor = case.tensor()
    dist.reduce(tensor, group_dst=case.ranks - 1, group=case.group)
    return [tensor] if case.rank == case.ranks - 1 else []


def gather(case: Case) -> list[Tensor]:
    places = case.places() if case.rank == 0 else None
    dist.gather(case.tensor(), places, group_dst=0, group=case.group)
    return places or []


def scatter(case: Case) -> list[Tensor]:
    tensor = case.empty()
    parts = case.parts() if case.rank == 0 else None
    dist.scatter(tensor, parts, group_src=0, group=case.group)
    return [tensor]


def all_to_all(case: Case) -> list[Tensor]:
    places = case.places()
    dist.all_to_all(places, case.parts(), group=case.group)
    return places


def all_to_all_single(case: Case) -> list[Tensor]:
    whole = case.empty(case.ranks)
    dist.all_to_all_single(whole, case.tensor(factor=case.ranks), group=case.group)
    return [whole]


def all_reduce_coalesced(case: Case) -> list[Tensor]:
    tensors = case.parts()
    options = dist.AllreduceCoalescedOptions()
    case.group.allreduce_coalesced(tensors, options).wait()
    return tensors


def all_gather_coalesced(case: Case) -> list[Tensor]:
    """Gloo cannot gather empty tensors this way."""
    places = [case.places() for _ in range(2)]
    if case.elements:
        # Unlike all_gather, it takes one list per rank.
        case.group.allgather_coalesced(
            [list(each) for each in zip(*places, strict=True)], [case.tensor(), case.tensor(1)]
        ).wait()
    return [*places[0], *places[1]]


def all_gather_into_tensor_coalesced(case: Case) -> list[Tensor]:
    wholes = [case.empty(case.ranks), case.empty(case.ranks)]
    case.group.allgather_into_tensor_coalesced(wholes, [case.tensor(), case.tensor(1)]).wait()
    return wholes


def reduce_scatter_tensor_coalesced(case: Case) -> list[Tensor]:
    tensors = [case.empty(), case.empty()]
    wholes = [case.tensor(salt, factor=case.ranks) for salt in range(2)]
    case.group.reduce_scatter_tensor_coalesced(tensors, wholes).wait()
    return tensors


def send_on(case: Case) -> list[Tensor]:
    """Blocking send to the next rank, even ranks first."""
    received = case.empty()
    if case.ranks == 1:
        return []
    for parity in (0, 1):
        if case.rank % 2 == parity:
            dist.send(case.tensor(), group_dst=(case.rank + 1) % case.ranks, group=case.group)
        if (case.rank - 1) % case.ranks % 2 == parity:
            dist.recv(received, group_src=(case.rank - 1) % case.ranks, group=case.group)
    return [received]


def send_with_tags(case: Case) -> list[Tensor]:
    """Two messages to the last rank, received in reverse order; then one from any rank."""
    places = [case.empty(), case.empty(), case.empty()]
    last = case.ranks - 1
    if case.ranks == 1 or case.elements == 0:  # gloo cannot receive these from any rank
        return []
    if case.rank == 0:
        works = [
            dist.isend(case.tensor(tag), group=case.group, tag=tag, group_dst=last)
            for tag in range(3)
        ]
    elif case.rank == last:
        works = [dist.irecv(places[tag], group=case.group, tag=tag, group_src=0) for tag in (1, 0)]
        works.append(dist.irecv(places[2], group=case.group, tag=2))
    else:
        return []
    for work in works:
        assert work is not None
        work.wait()
    return places


OWN: dict[str, Operation] = {
    "all_reduce SUM": partial(all_reduce, "SUM"),
    "all_reduce AVG": partial(all_reduce, "AVG"),
    "all_reduce MAX": partial(all_reduce, "MAX"),
    "all_reduce, two at once": all_reduce_later,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter SUM": partial(reduce_scatter, "SUM"),
    "reduce_scatter AVG": partial(reduce_scatter, "AVG"),
    "reduce_scatter_tensor SUM": partial(reduce_scatter_tensor, "SUM"),
    "reduce_scatter_tensor AVG": partial(reduce_scatter_tensor, "AVG"),
}
"""Operations that support non-contiguous tensors, which gloo does not."""

OTHERS: dict[str, Operation] = {
    **{f"all_reduce {name}": partial(all_reduce, name) for name in ("MIN", "PRODUCT", *BITWISE)},
    "reduce_scatter MAX": partial(reduce_scatter, "MAX"),
    "reduce_scatter_tensor MAX": partial(reduce_scatter_tensor, "MAX"),
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all_single,
    "all_reduce_coalesced": all_reduce_coalesced,
    "all_gather_coalesced": all_gather_coalesced,
    "all_gather_into_tensor_coalesced": all_gather_into_tensor_coalesced,
    "reduce_scatter_tensor_coalesced": reduce_scatter_tensor_coalesced,
    "send, recv": send_on,
    "isend, irecv with tags": send_with_tags,
}

Shape = tuple[torch.dtype, int, bool]
"""Dtype, number of elements, and whether the tensor is non-contiguous."""

FEW_SHAPES: list[Shape] = [(torch.float32, 1009, False), (torch.int64, 0, False)]
SOME_SHAPES: list[Shape] = [
    *((dtype, 1, False) for dtype in (torch.float32, torch.bool)),
    *((dtype, 1009, True) for dtype in (torch.float32, torch.bfloat16)),
    (torch.float32, 300_007, False),
    *FEW_SHAPES,
]
ALL_SHAPES: list[Shape] = [*((dtype, 1009, False) for dtype in DTYPES), *SOME_SHAPES]


def differences(communicator: Communicator, file: Path, way: str) -> dict[str, list[str]]:
    """Return, by operation, the cases in which the result differs from gloo."""
    with default_group(communicator, file, way) as ours:
        theirs = dist.new_group(backend="gloo")

        def differing(name: str, shapes: list[Shape]) -> list[str]:
            found = []
            for dtype, elements, is_strided in shapes:
                mine = outcome(name, Case(ours, elements, dtype, is_strided))
                reference = outcome(name, Case(theirs, elements, dtype))
                if not same(mine, reference):
                    found.append(f"{dtype}, {elements} elements, {is_strided=}")
            return found

        return {
            **{
                name: differing(name, ALL_SHAPES if way == "memory" else SOME_SHAPES)
                for name in OWN
            },
            **{name: differing(name, FEW_SHAPES) for name in OTHERS if way == "memory"},
        }


def outcome(name: str, case: Case) -> list[Tensor] | None:
    """Return the result, or None if the operation does not support the dtype."""
    operation = {**OWN, **OTHERS}[name]
    reduction = name.split()[-1]
    if reduction not in (BITWISE if case.dtype.is_floating_point else ("AVG",)):
        return operation(case)
    try:
        return operation(case)
    except (RuntimeError, ValueError):
        return None


def same(ours: list[Tensor] | None, theirs: list[Tensor] | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
