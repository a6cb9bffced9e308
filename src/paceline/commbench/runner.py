"""Measure as one of the workers: check and time every case at every size.

At each size all cases are checked and warmed up, then timed in alternating order, so that noise of
the machine affects all of them alike. Workers go through identical steps: decisions, such as the
number of repeats, use the slowest worker's time, which all workers know. A sample is the slowest
worker's time as well.

Workers that commbench/launch.py starts enter at `main`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, sleep

import torch
from torch import Tensor

from paceline.comm import hierarchical
from paceline.comm.communicator import Communicator
from paceline.comm.objects import all_gather_scalars, broadcast_json
from paceline.comm.rank_info import RankInfo
from paceline.commbench import operations
from paceline.commbench.codecs import time_codecs
from paceline.commbench.operations import ELEMENT_BYTES, Operation
from paceline.commbench.progress import ShowProgress, progress_display
from paceline.commbench.record import RECORD_FILE, Limit, Record, link_limit, make_record
from paceline.commbench.spec import BenchmarkSpec, Case, check_workers, size_text
from paceline.emulation.state import cluster_record
from paceline.errors import PacelineError, RunError, UsageError, error_line
from paceline.formatting import format_ranks
from paceline.launch import environment
from paceline.launch.consistency import run_collectively
from paceline.launch.worker import connect_workers, has_own_gpu
from paceline.records import RunFolder, read_json, write_json
from paceline.training.device import choose_device, computing

BATCH_SECONDS = 0.005
"""Short operations are timed in batches of about this duration, because the barrier before each
batch costs as much as an operation."""
MAX_BATCH = 200
MIN_REPEATS, MAX_REPEATS = 3, 50
MIN_BUFFER_BYTES = 2**26
"""Larger than caches, so that copying it measures main memory."""


@dataclass(slots=True)
class CaseTiming:
    """The samples of a case at one size."""

    case: Case
    size_bytes: int
    """Of the whole tensor."""
    batch: int
    """Consecutive operations per sample; the sample is their mean."""
    repeats: int
    samples: list[float] = field(default_factory=list)
    """Seconds per operation, each the slowest worker's."""


def main(argv: list[str]) -> int:
    """Run a worker process: `SPEC_FILE FOLDER quiet|shown`.

    The first worker writes the record into the folder.
    """
    spec = BenchmarkSpec.from_dict(read_json(Path(argv[0]))["plan"])
    folder = RunFolder(Path(argv[1]))
    rank_info = environment.detect()
    assert rank_info is not None
    try:
        with progress_display(quiet=argv[2] == "quiet" or rank_info.rank > 0) as show:
            record = run(rank_info, spec, show)
        if record is not None:
            write_json(folder.path / RECORD_FILE, record)
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001 - the folder is temporary and keeps no traceback
        raise RunError(error_line(error)) from None
    return 0


def run(
    rank_info: RankInfo, spec: BenchmarkSpec, show: ShowProgress = lambda text, done, total: None
) -> Record | None:
    """Measure together with the other workers; returns the record on rank 0. Collective.

    The spec of rank 0 applies to all workers.
    """
    check_workers(rank_info.world_size)
    config = replace(
        spec.machines, nnodes=rank_info.nnodes, nproc_per_node=rank_info.local_world_size, hosts=()
    )
    with (
        computing(config, rank_info.local_rank),
        connect_workers(config, rank_info, "comm", is_agreed=False) as network,
        contextlib.ExitStack() as stack,
    ):
        spec = BenchmarkSpec.from_dict(broadcast_json(network, spec.to_dict()))
        communicators: dict[str, Communicator] = {"torch": network}
        if "hierarchical" in spec.communicators:
            communicators["hierarchical"] = stack.enter_context(
                hierarchical.connect(network, rank_info.node_rank)
            )
        device = choose_device(config, rank_info.local_rank)
        buffer = run_collectively(network, lambda: _allocate(spec, rank_info.world_size, device))
        timings, left_out = _time_all_sizes(spec, communicators, buffer, show)
        codecs = time_codecs(spec, network, device, _slowest)
        memory: Limit | None = None
        # Main memory does not limit an exchange between GPUs.
        if rank_info.nnodes == 1 and device.type == "cpu":
            rate = copy_bytes_per_second(buffer, network)
            memory = Limit("memory", rate, "plain copy by all workers at once")
        network.barrier().wait()
    if rank_info.rank:
        return None
    cluster = cluster_record()
    limits = {"link": link_limit(spec, cluster), "memory": memory}
    location = _tensor_location(device, rank_info)
    return make_record(spec, rank_info, timings, codecs, left_out, limits, cluster, location)


def _allocate(spec: BenchmarkSpec, workers: int, device: torch.device) -> Tensor:
    size_bytes = max(spec.sizes[-1], MIN_BUFFER_BYTES)
    try:
        # Written to, so that no page is allocated while timing.
        return torch.ones(size_bytes // ELEMENT_BYTES + workers, device=device)
    except RuntimeError:
        raise UsageError(
            f"--max-size: a worker cannot allocate {size_text(size_bytes)}: reduce it"
        ) from None


def _tensor_location(device: torch.device, rank_info: RankInfo) -> str:
    """As the record and the tables name it."""
    if device.type == "cpu":
        return "main memory"
    return "own GPUs" if has_own_gpu(rank_info) else "shared GPUs"


def _time_all_sizes(
    spec: BenchmarkSpec,
    communicators: dict[str, Communicator],
    buffer: Tensor,
    show: ShowProgress,
) -> tuple[list[CaseTiming], list[tuple[Case, int]]]:
    """The timings, and the cases and sizes skipped because a smaller size took too long."""
    cases = spec.cases()
    timings: list[CaseTiming] = []
    left_out: list[tuple[Case, int]] = []
    for number, size in enumerate(spec.sizes):
        show(f"{size_text(size)}, {len(cases)} cases", number, len(spec.sizes))
        left_out += [(case, size) for case in spec.cases() if case not in cases]
        if not cases:
            continue
        of_size = time_size(size, cases, communicators, buffer, spec)
        timings += of_size
        cases = [each.case for each in of_size if min(each.samples) <= spec.most_seconds]
    return timings, left_out


def time_size(
    size_bytes: int,
    cases: Sequence[Case],
    communicators: Mapping[str, Communicator],
    buffer: Tensor,
    spec: BenchmarkSpec,
) -> list[CaseTiming]:
    """Time all cases at one size. Collective; the result is the same on every worker."""
    control = communicators["torch"]
    pending: list[tuple[Operation, CaseTiming]] = []
    for case in cases:
        operation = operations.make(case, communicators[case.communicator], buffer, size_bytes)
        _check(operation, case, control)
        (slowest,) = _slowest(control, [_time_batch(operation, control, 1)])
        pending.append((operation, _plan_timing(case, operation, slowest, spec)))
    own: list[list[float]] = [[] for _ in pending]
    for number in range(max(timing.repeats for _, timing in pending)):
        # Alternate the direction, so that no case always follows the same one.
        order = range(len(pending))[:: -1 if number % 2 else 1]
        for index in order:
            operation, timing = pending[index]
            if number < timing.repeats:
                sleep(spec.pause_seconds)
                own[index].append(_time_batch(operation, control, timing.batch))
    flat = _slowest(control, [sample for series in own for sample in series])
    for _, timing in pending:
        timing.samples, flat = flat[: timing.repeats], flat[timing.repeats :]
    return [timing for _, timing in pending]


def _plan_timing(
    case: Case, operation: Operation, seconds: float, spec: BenchmarkSpec
) -> CaseTiming:
    """Batch size and repeats for an operation that took `seconds`."""
    batch = 1
    if operation.can_batch and not spec.pause_seconds:
        batch = min(max(1, round(BATCH_SECONDS / max(seconds, 1e-9))), MAX_BATCH)
    affordable = int(spec.seconds / max(seconds * batch + spec.pause_seconds, 1e-9))
    repeats = spec.repeats or min(max(MIN_REPEATS, affordable), MAX_REPEATS)
    return CaseTiming(case, operation.tensor.numel() * ELEMENT_BYTES, batch, repeats)


def _check(operation: Operation, case: Case, control: Communicator) -> None:
    """RunError on every worker if any worker has a wrong result. Collective."""
    operation.fill()
    operation.run()
    wrong = all_gather_scalars(control, torch.tensor(int(not operation.is_correct())))
    # Zeros stay zeros through any number of sums; other values would overflow.
    operation.tensor.zero_()
    if wrong.any():
        ranks = format_ranks([rank for rank in range(control.world_size) if wrong[rank]])
        raise RunError(
            f"{case.operation} by {case.algorithm} through {case.communicator} gave a wrong result:"
            f" {size_text(operation.tensor.nbytes)}, {ranks}"
        )


def _time_batch(operation: Operation, control: Communicator, batch: int) -> float:
    """Seconds per operation of a batch that all workers start together."""
    control.barrier().wait()
    began = perf_counter()
    for _ in range(batch):
        operation.run()
    if operation.tensor.is_cuda:
        # wait() may only order CUDA streams, without blocking this thread.
        torch.cuda.synchronize(operation.tensor.device)
    return (perf_counter() - began) / (batch * operation.transfers)


def _slowest(control: Communicator, seconds: Sequence[float]) -> list[float]:
    """The maximum over workers of each value. Collective."""
    table = all_gather_scalars(control, torch.tensor(seconds, dtype=torch.float64))
    slowest: list[float] = table.amax(0).tolist()
    return slowest


def copy_bytes_per_second(buffer: Tensor, control: Communicator, repeats: int = 5) -> float:
    """Memory bandwidth of a worker while all of them copy at once. Collective."""
    half = buffer.numel() // 2
    source, target = buffer[:half], buffer[half : 2 * half]
    seconds = []
    for _ in range(repeats + 1):
        control.barrier().wait()
        began = perf_counter()
        target.copy_(source)
        seconds.append(perf_counter() - began)
    # The first copy is a warm-up.
    slowest = sorted(_slowest(control, seconds[1:]))
    return source.nbytes / slowest[len(slowest) // 2]
