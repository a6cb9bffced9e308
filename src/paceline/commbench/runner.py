"""One size of all ways: warm up, check, then time them by turns so that noise falls on all alike.

All workers go through the same steps; what they decide by, such as how long the warm-up took, is
the slowest worker's figure, which all of them know. A repeat counts with the slowest worker's time.

Measuring, as one of the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from paceline.comm import hierarchical
from paceline.comm.communicator import Communicator, format_ranks
from paceline.comm.objects import broadcast_json
from paceline.comm.rank_info import RankInfo
from paceline.commbench import operations
from paceline.commbench.launch import Show
from paceline.commbench.operations import ELEMENT_BYTES, Operation
from paceline.commbench.record import Limit, Record, link_limit, make_record
from paceline.commbench.spec import BenchmarkSpec, Case, check_workers, size_text
from paceline.emulation.state import cluster_record
from paceline.errors import RunError, UsageError
from paceline.launch.consistency import run_collectively
from paceline.launch.worker import connection, has_own_gpu
from paceline.training.device import choose_device, computing

ROW_SECONDS = 0.005
"""Short operations are timed in rows of about this length: a start in step costs as much as one."""
LONGEST_ROW = 200
LEAST_REPEATS, MOST_REPEATS = 3, 50


@dataclass(slots=True)
class CaseTiming:
    """A way at one size."""

    way: Case
    size_bytes: int
    """Of the whole tensor."""
    row: int
    """Operations in a row, of which a sample is the mean."""
    repeats: int
    samples: list[float] = field(default_factory=list)
    """Seconds of one operation, each the slowest worker's."""


def time_size(
    size_bytes: int,
    ways: Sequence[Case],
    communicators: Mapping[str, Communicator],
    buffer: Tensor,
    plan: BenchmarkSpec,
) -> list[CaseTiming]:
    """Collective; the same on every worker."""
    control = communicators["torch"]
    contestants: list[tuple[Operation, CaseTiming]] = []
    for way in ways:
        operation = operations.make(way, communicators[way.communicator], buffer, size_bytes)
        _check(operation, way, control)
        (slowest,) = _slowest(control, [_once(operation, control, 1)])
        contestants.append((operation, _plan_of(way, operation, slowest, plan)))
    own: list[list[float]] = [[] for _ in contestants]
    for number in range(max(timed.repeats for _, timed in contestants)):
        # There and back again, so that nobody always comes after the same one.
        order = range(len(contestants))[:: -1 if number % 2 else 1]
        for index in order:
            operation, timed = contestants[index]
            if number < timed.repeats:
                own[index].append(_once(operation, control, timed.row))
    flat = _slowest(control, [each for series in own for each in series])
    for _, timed in contestants:
        timed.samples, flat = flat[: timed.repeats], flat[timed.repeats :]
    return [timed for _, timed in contestants]


def _plan_of(way: Case, operation: Operation, seconds: float, plan: BenchmarkSpec) -> CaseTiming:
    row = 1
    if operation.in_rows:
        row = min(max(1, round(ROW_SECONDS / max(seconds, 1e-9))), LONGEST_ROW)
    fitting = int(plan.seconds / max(seconds * row, 1e-9))
    repeats = plan.repeats or min(max(LEAST_REPEATS, fitting), MOST_REPEATS)
    return CaseTiming(way, operation.tensor.numel() * ELEMENT_BYTES, row, repeats)


def _check(operation: Operation, way: Case, control: Communicator) -> None:
    operation.fill()
    operation.run()
    wrong = torch.zeros(control.world_size, dtype=torch.int64)
    wrong[control.rank] = not operation.is_right()
    control.all_reduce(wrong, "control").wait()
    # Sums of nothing stay nothing, however often they are added up.
    operation.tensor.zero_()
    if wrong.any():
        where = format_ranks([rank for rank in range(control.world_size) if wrong[rank]])
        raise RunError(
            f"{way.operation} by {way.algorithm} through {way.communicator} gave a wrong result:"
            f" {size_text(operation.tensor.nbytes)}, {where}"
        )


def _once(operation: Operation, control: Communicator, row: int) -> float:
    """Seconds of one operation of a row, from a common start."""
    control.barrier().wait()
    began = perf_counter()
    for _ in range(row):
        operation.run()
    if operation.tensor.is_cuda:
        # What was begun on a GPU may have been waited for only there.
        torch.cuda.synchronize(operation.tensor.device)
    return (perf_counter() - began) / (row * operation.transfers)


def _slowest(control: Communicator, seconds: Sequence[float]) -> list[float]:
    """Of each figure, that of the worker where it is greatest. Collective."""
    table = torch.zeros(control.world_size, len(seconds), dtype=torch.float64)
    table[control.rank] = torch.tensor(seconds, dtype=torch.float64)
    control.all_reduce(table, "control").wait()
    slowest: list[float] = table.amax(0).tolist()
    return slowest


def copy_bytes_per_second(buffer: Tensor, control: Communicator, repeats: int = 5) -> float:
    """What each worker gets of the machine's memory when all copy at once. Collective."""
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    seconds = []
    for _ in range(repeats + 1):
        control.barrier().wait()
        began = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - began)
    # The first one brings the memory in.
    slowest = sorted(_slowest(control, seconds[1:]))
    return source.nbytes / slowest[len(slowest) // 2]


LEAST_COPIED_BYTES = 2**26
"""More than caches hold, so that it is the memory that is measured."""


def run(
    place: RankInfo, plan: BenchmarkSpec, show: Show = lambda text, done, total: None
) -> Record | None:
    """Measure together with the other workers; the first one gets the record. Collective.

    The first worker's plan counts.
    """
    check_workers(place.world_size)
    config = replace(
        plan.machines, nnodes=place.nnodes, nproc_per_node=place.local_world_size, hosts=()
    )
    with (
        computing(config, place.local_rank),
        connection(config, place, "comm", is_agreed=False) as network,
        contextlib.ExitStack() as stack,
    ):
        plan = BenchmarkSpec.from_dict(broadcast_json(network, plan.to_dict()))
        communicators: dict[str, Communicator] = {"torch": network}
        if "hierarchical" in plan.communicators:
            communicators["hierarchical"] = stack.enter_context(
                hierarchical.connect(network, place.node)
            )
        device = choose_device(config, place.local_rank)
        buffer = run_collectively(network, lambda: _allocate(plan, place.world_size, device))
        timed, left_out = _time_all(plan, communicators, buffer, show)
        memory: Limit | None = None
        # Between GPUs the memory of neither is what limits.
        if place.nnodes == 1 and device.type == "cpu":
            rate = copy_bytes_per_second(buffer, network)
            memory = Limit("memory", rate, "a plain copy by all workers at once")
        network.barrier().wait()
    if place.rank:
        return None
    cluster = cluster_record()
    limits = {"link": link_limit(plan, cluster), "memory": memory}
    return make_record(plan, place, timed, left_out, limits, cluster, _tensors(device, place))


def _time_all(
    plan: BenchmarkSpec, communicators: dict[str, Communicator], buffer: Tensor, show: Show
) -> tuple[list[CaseTiming], list[tuple[Case, int]]]:
    """And what was left out because a smaller size had taken too long."""
    ways = plan.ways()
    timed: list[CaseTiming] = []
    left_out: list[tuple[Case, int]] = []
    for number, size in enumerate(plan.sizes):
        show(f"{size_text(size)}, {len(ways)} ways", number, len(plan.sizes))
        left_out += [(way, size) for way in plan.ways() if way not in ways]
        if not ways:
            continue
        these = time_size(size, ways, communicators, buffer, plan)
        timed += these
        ways = [each.way for each in these if min(each.samples) <= plan.most_seconds]
    return timed, left_out


def _tensors(device: torch.device, place: RankInfo) -> str:
    """Where the tensors are; as record and tables say it."""
    if device.type == "cpu":
        return "main memory"
    return "own GPUs" if has_own_gpu(place) else "shared GPUs"


def _allocate(plan: BenchmarkSpec, workers: int, device: torch.device) -> Tensor:
    size_bytes = max(plan.sizes[-1], LEAST_COPIED_BYTES)
    try:
        # Written to, so that the memory is there before anything is timed.
        return torch.ones(size_bytes // ELEMENT_BYTES + workers, device=device)
    except RuntimeError:
        raise UsageError(
            f"--max-size: a worker has no memory for {size_text(size_bytes)}: give less"
        ) from None
