"""One worker: connect to the others, prepare, train, and on rank 0 write the result.

It is the only one, or started by launch/processes.py (through launch/child_main.py), by torchrun or
by srun; launch/environment.py detects its rank.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.comm import hierarchical, in_process, shared_gpu
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import TorchCommunicator, connect
from paceline.config import RunConfig, from_record
from paceline.emulation.state import VARIABLE as CLUSTER_VARIABLE
from paceline.errors import PacelineError
from paceline.launch import environment
from paceline.launch.consistency import (
    agree_on_config,
    agree_on_folder,
    run_collectively,
    shares_first_folder,
)
from paceline.launch.parameter_servers import connect_servers, local_parameter_servers
from paceline.launch.record_collection import (
    cleans_folder,
    collect_records,
    collect_reports,
    final_barrier,
    write_report,
)
from paceline.launch.result import RunOutcome, finish_run, first_cause, is_rejection
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import Termination, post_failure
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.sampler import ResourceSampler
from paceline.measure.startup import StartupTimer
from paceline.records import RunFolder, read_json
from paceline.strategies import create_strategy
from paceline.training.checkpoint import Checkpoint, CheckpointStore
from paceline.training.device import choose_device, threads_of
from paceline.training.display import open_display
from paceline.training.gpu import cuda_context
from paceline.training.rank_report import RankReport
from paceline.training.run_state import check_fits
from paceline.training.trainer import Prepared, RankContext, check_work_is_left, prepare, run_worker


def main(arguments: list[str]) -> int:
    """Run a worker process (launch/child_main.py): `CONFIG FOLDER new|resumed quiet|shown`."""
    clock = PhaseClock()
    clock.startup.begin("rendezvous")
    config = from_record(read_json(Path(arguments[0]))["config"])
    folder = RunFolder(Path(arguments[1]))
    resumed, quiet = arguments[2] == "resumed", arguments[3] == "quiet"
    rank_info = environment.detect()
    assert rank_info is not None
    _start_device(config, rank_info)
    # A fork has the number of the process that imported torch, which may have other cores.
    torch.set_num_threads(threads_of(config))
    with (
        SignalMonitor() as signals,
        connect_workers(config, rank_info) as communicator,
        connect_servers(
            config,
            create_strategy(config.strategy, config.options),
            rank_info,
            communicator.traffic,
        ) as servers,
    ):
        ready = prepare_worker(config, folder, rank_info, communicator, resumed, clock.startup)
        ready.context.servers = servers
        report = _train(config, folder, ready, quiet, clock)
        write_report(folder, rank_info.rank, report)
        signals.raise_on_signal = False
        if report.status != "finished" and not folder.report_file(rank_info.rank).exists():
            post_failure(rank_info, Termination.of_report(report))
        final_barrier(communicator, report)
        return report.exit_code


def run(
    config: RunConfig, rank_info: RankInfo, resumed: RunFolder | None, quiet: bool
) -> RunOutcome:
    """Train as the only worker, or as one of those that torchrun or srun started."""
    clock = PhaseClock()
    clock.startup.begin("rendezvous" if rank_info.world_size > 1 else "model")
    _start_device(config, rank_info)
    with SignalMonitor() as signals, contextlib.ExitStack() as stack:
        try:
            with connect_workers(config, rank_info, is_agreed=False) as communicator:
                folder = agree_on_folder(
                    communicator,
                    stack,
                    lambda: resumed or RunFolder.create(config),
                    lambda name: resumed or RunFolder.open_or_create(config, name),
                )
                shares_folder = shares_first_folder(folder, communicator)
                ready = _prepare_or_discard(
                    config, folder, rank_info, communicator, resumed, shares_folder, clock.startup
                )
                # torchrun signals all workers when one fails; the result is written first.
                signals.raise_on_signal = rank_info == SINGLE_PROCESS
                strategy = ready.prepared.strategy
                with (
                    local_parameter_servers(config, strategy, folder, rank_info),
                    connect_servers(config, strategy, rank_info, communicator.traffic) as servers,
                    sampler_for(config, folder, rank_info) as sampler,
                ):
                    ready.context.servers = servers
                    report = _train(config, folder, ready, quiet, clock)
                    signals.raise_on_signal = False
                    if rank_info.world_size > 1:
                        # Before servers and sampler end: rank 0 waits only seconds for it.
                        write_report(folder, rank_info.rank, report)
                if warning := sampler.stop():
                    report.warnings.append(warning)
                    if rank_info.world_size > 1:
                        write_report(folder, rank_info.rank, report)
                reports: list[RankReport] | None = [report]
                if rank_info.world_size > 1:
                    reports = collect_records(
                        folder, rank_info, communicator, report, shares_folder
                    )
        except PacelineError as error:
            error.already_reported = rank_info.rank > 0
            raise
        is_new = resumed is None
        return _conclude(config, folder, rank_info, report, reports, shares_folder, is_new)


def _start_device(config: RunConfig, rank_info: RankInfo) -> None:
    if config.device != "cpu":
        cuda_context.create_in_background(rank_info.local_rank)


def _conclude(
    config: RunConfig,
    folder: RunFolder,
    rank_info: RankInfo,
    report: RankReport,
    reports: list[RankReport] | None,
    shares_folder: bool,
    is_new: bool,
) -> RunOutcome:
    records = folder.record_files(range(rank_info.world_size), range(rank_info.nnodes))
    if rank_info.rank:
        if cleans_folder(rank_info, shares_folder) and _is_rejection([report], is_new):
            own = collect_reports(folder, rank_info.world_size, expected=rank_info.local_world_size)
            if _is_rejection(own, is_new):
                folder.discard(records)
        if report.status != "finished" and not report.is_secondary:
            error = Termination.of_report(report).error()
            # Rank 0 of the same machine reads the report and prints the error.
            error.already_reported = rank_info.node_rank == 0 or report.status == "stopped"
            raise error
        return RunOutcome(folder, None, report.exit_code)
    reports = reports or collect_reports(
        folder, rank_info.world_size, expected=rank_info.world_size
    )
    outcome = finish_run(
        config, folder, reports, first_cause(reports), is_new=is_new, records=records
    )
    return outcome._replace(exit_code=report.exit_code)


def _is_rejection(reports: list[RankReport], is_new: bool) -> bool:
    cause = first_cause(reports)
    return cause is not None and is_rejection(cause, reports, is_new)


def _prepare_or_discard(
    config: RunConfig,
    folder: RunFolder,
    rank_info: RankInfo,
    communicator: Communicator,
    resumed: RunFolder | None,
    shares_folder: bool,
    startup: StartupTimer,
) -> _Ready:
    try:
        return prepare_worker(config, folder, rank_info, communicator, resumed is not None, startup)
    except BaseException:
        # Nothing was trained: a rejected run leaves no files, and its name stays free.
        if resumed is None and cleans_folder(rank_info, shares_folder):
            folder.discard()
        raise


def sampler_for(config: RunConfig, folder: RunFolder, rank_info: RankInfo) -> ResourceSampler:
    """Samples a single worker itself, otherwise the parent of the node's workers."""
    return ResourceSampler(
        folder.resources_file(rank_info.node_rank),
        [os.getpid() if rank_info == SINGLE_PROCESS else os.getppid()],
        node=rank_info.node_rank,
        interval_seconds=config.sample_seconds if rank_info.local_rank == 0 else 0,
    )


@contextlib.contextmanager
def connect_workers(
    config: RunConfig, rank_info: RankInfo, name: str = "workers", *, is_agreed: bool = True
) -> Iterator[Communicator]:
    """Connect to the other workers, for the duration of the block. Collective.

    `is_agreed`: all are known to have the same configuration; otherwise they compare it first.
    """
    if rank_info.world_size == 1:
        with in_process.single() as communicator:
            yield communicator
        return
    rendezvous = Rendezvous(
        rank_info.rank,
        rank_info.world_size,
        rank_info.master_addr,
        rank_info.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False if rank_info.has_external_store else None,
        # The store outlives restarts of the workers.
        name=f"{name}/{rank_info.restart_count}",
    )
    with _connect(config, rank_info, rendezvous) as network:
        if not is_agreed:
            agree_on_config(config, network)
        if config.communicator == "torch":
            yield network
            return
        with hierarchical.connect(network, rank_info.node_rank) as communicator:
            yield communicator


def _connect(config: RunConfig, rank_info: RankInfo, rendezvous: Rendezvous) -> TorchCommunicator:
    """Connect by torch.distributed, and on GPUs by what their number allows. Collective."""
    device, seconds = choose_device(config, rank_info.local_rank), config.timeout_seconds
    if device.type == "cuda" and has_own_gpu(rank_info):
        return connect(rendezvous, gpu=device, timeout_seconds=seconds)
    # Nodes of an emulated cluster share GPUs, but must not share their memory.
    is_one_machine = rank_info.nnodes == 1 and CLUSTER_VARIABLE not in os.environ
    if device.type == "cuda" and is_one_machine and config.communicator == "torch":
        return shared_gpu.connect(rendezvous, device, timeout_seconds=seconds)
    return connect(rendezvous, timeout_seconds=seconds)


def has_own_gpu(rank_info: RankInfo) -> bool:
    """Whether every worker of this machine has its own GPU, as NCCL requires."""
    if CLUSTER_VARIABLE in os.environ:
        # Nodes of an emulated cluster share GPUs, and NCCL would bypass their links.
        return False
    return torch.cuda.is_available() and torch.cuda.device_count() >= rank_info.local_world_size


@dataclass(slots=True)
class _Ready:
    """What a worker needs to train."""

    context: RankContext
    prepared: Prepared
    checkpoint: Checkpoint | None


def prepare_worker(
    config: RunConfig,
    folder: RunFolder,
    rank_info: RankInfo,
    communicator: Communicator,
    resumed: bool,
    startup: StartupTimer,
) -> _Ready:
    """Load data, model and checkpoint; a UsageError on one rank is raised on all. Collective."""
    prepared = _prepare_in_turns(config, rank_info, communicator, startup)
    is_first = rank_info.rank == 0
    store = run_collectively(
        communicator, lambda: _open_store(config, folder) if is_first else None
    )
    checkpoint = broadcast_checkpoint(store, communicator) if resumed else None
    if checkpoint:
        found = checkpoint

        def check() -> None:
            # On every rank, so that all start with the same weights.
            check_fits(found.state, config, prepared.model)
            # An elastic run may lose its workers between the last iteration and the result.
            if is_first and not config.elastic:
                check_work_is_left(config, prepared, found, folder.is_finished)

        run_collectively(communicator, check)
    if is_first:
        folder.change_config(config)
        folder.archive_result()
    return _Ready(RankContext(rank_info, communicator, store), prepared, checkpoint)


def _prepare_in_turns(
    config: RunConfig, rank_info: RankInfo, communicator: Communicator, startup: StartupTimer
) -> Prepared:
    """The first rank of each node loads before the others, so that caches are built once."""

    def load() -> Prepared:
        prepared = prepare(config, rank_info.local_rank, startup)
        if rank_info.world_size > 1:
            # From here on it waits for the other workers.
            startup.enter("rendezvous")
        return prepared

    leads = rank_info.local_rank == 0
    prepared = run_collectively(communicator, lambda: load() if leads else None)
    return run_collectively(communicator, lambda: prepared or load())


def _open_store(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    return CheckpointStore(folder.checkpoints, config.checkpoint_keep, config.checkpoint_mode)


def broadcast_checkpoint(
    store: CheckpointStore | None, communicator: Communicator
) -> Checkpoint | None:
    """Rank 0 reads the newest checkpoint and broadcasts it; None on all ranks without one."""
    found = run_collectively(communicator, lambda: store.newest() if store else None)
    if communicator.world_size == 1:
        return found
    buffer = io.BytesIO()
    if found is not None:
        torch.save(found.state, buffer)
    size = len(buffer.getvalue())
    header = broadcast_json(communicator, [size, found.iteration] if found else None)
    if header is None:
        return None
    packed = torch.frombuffer(bytearray(buffer.getvalue() or header[0]), dtype=torch.uint8)
    communicator.broadcast(packed, 0, "parameters").wait()
    if found is not None:
        return found
    file = io.BytesIO(packed.numpy().tobytes())
    state = torch.load(file, map_location="cpu", weights_only=True)
    return Checkpoint(header[1], state)


def _train(
    config: RunConfig, folder: RunFolder, ready: _Ready, quiet: bool, clock: PhaseClock
) -> RankReport:
    context = ready.context
    display = open_display(quiet or context.rank_info.rank > 0)
    return run_worker(config, folder, ready.prepared, context, ready.checkpoint, display, clock)
