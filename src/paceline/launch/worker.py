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

from paceline.comm import hierarchical, in_process
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.torch_distributed import connect
from paceline.config import RunConfig, from_record
from paceline.emulation.state import VARIABLE as CLUSTER_VARIABLE
from paceline.errors import PacelineError
from paceline.launch import environment
from paceline.launch.consistency import agree_on_config, run_collectively
from paceline.launch.messages import check_run_name
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
from paceline.training.checkpoint import Checkpoint, CheckpointStore
from paceline.training.device import choose_device
from paceline.training.display import open_display
from paceline.training.rank_report import RankReport
from paceline.training.run_state import check_fits
from paceline.training.trainer import Prepared, RankContext, check_work_is_left, prepare, run_worker


def main(arguments: list[str]) -> int:
    """A child of launch/processes.py: `CONFIG FOLDER new|resumed quiet|shown`."""
    clock = PhaseClock()
    clock.startup.begin("rendezvous")
    config = from_record(read_json(Path(arguments[0]))["config"])
    folder = RunFolder(Path(arguments[1]))
    resumed, quiet = arguments[2] == "resumed", arguments[3] == "quiet"
    place = environment.detect()
    assert place is not None
    with (
        SignalMonitor() as signals,
        connect_workers(config, place) as communicator,
        connect_servers(config, place, communicator.traffic) as servers,
    ):
        ready = prepare_worker(config, folder, place, communicator, resumed, clock.startup)
        ready.team.servers = servers
        report = _train(config, folder, ready, quiet, clock)
        write_report(folder, place.rank, report)
        signals.raise_on_signal = False
        if report.status != "finished" and not folder.report_file(place.rank).exists():
            post_failure(place, Termination.of_report(report))
        final_barrier(communicator, report)
        return report.exit_code


def run(config: RunConfig, place: RankInfo, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Train as the only worker, or as one of those that torchrun or srun started."""
    clock = PhaseClock()
    clock.startup.begin("rendezvous" if place.world_size > 1 else "model")
    with SignalMonitor() as signals, contextlib.ExitStack() as held:
        try:
            with connect_workers(config, place, is_agreed=False) as communicator:
                folder = _agree_on_folder(config, resumed, communicator, held)
                shares_folder = _shares_folder(folder, communicator)
                ready = _make_ready_or_discard(
                    config, folder, place, communicator, resumed, shares_folder, clock.startup
                )
                # Whoever watches over the workers ends all when one fails; the result comes first.
                signals.raise_on_signal = False
                with (
                    local_parameter_servers(config, folder, place),
                    connect_servers(config, place, communicator.traffic) as servers,
                    _sampler(config, folder, place) as sampler,
                ):
                    ready.team.servers = servers
                    report = _train(config, folder, ready, quiet, clock)
                    if place.world_size > 1:
                        # At once: rank 0 waits only for seconds.
                        write_report(folder, place.rank, report)
                if trouble := sampler.stop():
                    report.warnings.append(trouble)
                    if place.world_size > 1:
                        write_report(folder, place.rank, report)
                reports: list[RankReport] | None = [report]
                if place.world_size > 1:
                    reports = collect_records(folder, place, communicator, report, shares_folder)
        except PacelineError as error:
            error.already_reported = place.rank > 0
            raise
        is_new = resumed is None
        return _conclude(config, folder, place, report, reports, shares_folder, is_new)


def _conclude(
    config: RunConfig,
    folder: RunFolder,
    place: RankInfo,
    report: RankReport,
    reports: list[RankReport] | None,
    shares_folder: bool,
    is_new: bool,
) -> RunOutcome:
    records = folder.record_files(range(place.world_size), range(place.nnodes))
    if place.rank:
        if cleans_folder(place, shares_folder) and _is_rejection([report], is_new):
            own = collect_reports(folder, place.world_size, expected=place.local_world_size)
            if _is_rejection(own, is_new):
                folder.discard(records)
        if report.status != "finished" and not report.is_secondary:
            error = Termination.of_report(report).error()
            # The first worker of the same machine finds the report, and tells.
            error.already_reported = place.node_rank == 0 or report.status == "stopped"
            raise error
        return RunOutcome(folder, None, report.exit_code)
    reports = reports or collect_reports(folder, place.world_size, expected=place.world_size)
    outcome = finish_run(
        config, folder, reports, first_cause(reports), is_new=is_new, records=records
    )
    return outcome._replace(exit_code=report.exit_code)


def _is_rejection(reports: list[RankReport], is_new: bool) -> bool:
    cause = first_cause(reports)
    return cause is not None and is_rejection(cause, reports, is_new)


def _make_ready_or_discard(
    config: RunConfig,
    folder: RunFolder,
    place: RankInfo,
    communicator: Communicator,
    resumed: RunFolder | None,
    shares_folder: bool,
    startup: StartupTimer,
) -> _Ready:
    try:
        return prepare_worker(config, folder, place, communicator, resumed is not None, startup)
    except BaseException:
        # Nothing was trained: a rejected run leaves no files, and its name stays free.
        if resumed is None and cleans_folder(place, shares_folder):
            folder.discard()
        raise


def _sampler(config: RunConfig, folder: RunFolder, place: RankInfo) -> ResourceSampler:
    """Samples a single worker itself, otherwise the parent of the node's workers."""
    return ResourceSampler(
        folder.resources_file(place.node_rank),
        [os.getpid() if place == SINGLE_PROCESS else os.getppid()],
        node=place.node_rank,
        interval_seconds=config.sample_seconds if place.local_rank == 0 else 0,
    )


@contextlib.contextmanager
def connect_workers(
    config: RunConfig, place: RankInfo, name: str = "workers", *, is_agreed: bool = True
) -> Iterator[Communicator]:
    """Connect to the other workers, for the duration of the block. Collective.

    `is_agreed`: all are known to have the same configuration; otherwise they compare it first.
    """
    if place.world_size == 1:
        with in_process.single() as communicator:
            yield communicator
        return
    device = choose_device(config, place.local_rank)
    rendezvous = Rendezvous(
        place.rank,
        place.world_size,
        place.master_addr,
        place.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False if place.has_external_store else None,
        # Whoever starts failed workers anew keeps the store.
        name=f"{name}/{place.restart_count}",
    )
    gpu = device if has_own_gpu(place) and device.type == "cuda" else None
    with connect(rendezvous, gpu=gpu, timeout_seconds=config.timeout_seconds) as network:
        if not is_agreed:
            agree_on_config(config, network)
        if config.communicator == "torch":
            yield network
            return
        with hierarchical.connect(network, place.node_rank) as communicator:
            yield communicator


def has_own_gpu(place: RankInfo) -> bool:
    """Whether every worker of this machine has one to itself, as NCCL needs."""
    if CLUSTER_VARIABLE in os.environ:
        # All nodes of an emulated cluster have the same GPUs, and NCCL would go round their links.
        return False
    return torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size


def _agree_on_folder(
    config: RunConfig,
    resumed: RunFolder | None,
    communicator: Communicator,
    held: contextlib.ExitStack,
) -> RunFolder:
    """The first worker makes the run's folder; the others use or make one of the same name.

    The first one locks it, for as long as `held` is open.
    """

    def make() -> RunFolder | None:
        if communicator.rank:
            return None
        folder = resumed or RunFolder.create(config)
        held.enter_context(folder.locked())
        return folder

    made = run_collectively(communicator, make)
    if resumed:
        return resumed
    if made and communicator.world_size == 1:
        return made
    name = check_run_name(broadcast_json(communicator, made.id if made else None))
    return run_collectively(communicator, lambda: made or RunFolder.open_or_create(config, name))


def _shares_folder(folder: RunFolder, communicator: Communicator) -> bool:
    """Whether this worker's folder is the very one of the first worker. Collective."""
    identity = folder.identity()
    return bool(broadcast_json(communicator, identity) == identity)


@dataclass(slots=True)
class _Ready:
    """All that a worker needs to begin."""

    team: RankContext
    prepared: Prepared
    checkpoint: Checkpoint | None


def prepare_worker(
    config: RunConfig,
    folder: RunFolder,
    place: RankInfo,
    communicator: Communicator,
    resumed: bool,
    startup: StartupTimer,
) -> _Ready:
    """Load what is needed; what one worker finds to be refused is refused on all. Collective."""
    prepared = _prepare_in_turns(config, place, communicator, startup)
    is_first = place.rank == 0
    store = run_collectively(
        communicator, lambda: _open_store(config, folder) if is_first else None
    )
    checkpoint = broadcast_checkpoint(store, communicator) if resumed else None
    if checkpoint:
        found = checkpoint

        def check() -> None:
            # On every worker, so that all of them begin with the same weights.
            check_fits(found.state, config, prepared.model)
            # Workers of an elastic run may be lost after the last iteration, and the result too.
            if is_first and not config.elastic:
                check_work_is_left(config, prepared, found, folder.is_finished)

        run_collectively(communicator, check)
    if is_first:
        folder.change_config(config)
        folder.archive_result()
    return _Ready(RankContext(place, communicator, store), prepared, checkpoint)


def _prepare_in_turns(
    config: RunConfig, place: RankInfo, communicator: Communicator, startup: StartupTimer
) -> Prepared:
    """The first of each node loads before the others, so that what it caches is made once."""

    def load() -> Prepared:
        prepared = prepare(config, place.local_rank, startup)
        if place.world_size > 1:
            # From here on it waits for the other workers.
            startup.enter("rendezvous")
        return prepared

    leads = place.local_rank == 0
    prepared = run_collectively(communicator, lambda: load() if leads else None)
    return run_collectively(communicator, lambda: prepared or load())


def _open_store(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    return CheckpointStore(folder.checkpoints, config.checkpoint_keep, config.checkpoint_mode)


def broadcast_checkpoint(
    store: CheckpointStore | None, communicator: Communicator
) -> Checkpoint | None:
    """Rank 0 reads it; the others may be on machines that do not have the file.

    None on all of them where there is no checkpoint yet.
    """
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
    team = ready.team
    display = open_display(quiet or team.place.rank > 0)
    return run_worker(config, folder, ready.prepared, team, ready.checkpoint, display, clock)
