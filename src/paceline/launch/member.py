"""This process is one worker of several: meet the others, train, hand in the records.

Started by launch/team.py, by torchrun, by srun or by hand; launch/environment.py tells which of the
workers it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_bytes, gather_json
from paceline.comm.place import Place
from paceline.comm.rendezvous import Meeting
from paceline.comm.torch_distributed import connect
from paceline.config import RunConfig, fields, flag_of, from_mapping
from paceline.errors import ConfigError, PacelineError
from paceline.launch import environment
from paceline.launch.lifeline import tie_to_parent
from paceline.launch.outcome import Outcome
from paceline.launch.result import write_result
from paceline.measure.clock import PhaseClock
from paceline.measure.sampler import ResourceSampler
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.worker.checkpoint import Checkpoint, CheckpointStore
from paceline.worker.device import choose_device
from paceline.worker.display import Display, open_display
from paceline.worker.report import WorkerReport
from paceline.worker.run import Prepared, Team, prepare, run_worker

OF_THIS_NODE = ("node_rank", "out", "name", "data_dir", "threads")
"""Settings that may differ from machine to machine."""


def run(config: RunConfig, place: Place, resumed: RunFolder | None, quiet: bool) -> Outcome:
    """Train as one of several that nobody of ours watches over (torchrun, srun)."""
    display = open_display(quiet or place.rank > 0)
    clock = PhaseClock()
    with _connection(config, place) as communicator:
        config = agree_on_config(config, communicator)
        folder = _agree_on_folder(config, resumed, communicator)
        sampler = ResourceSampler(
            folder.resources_file(place.node),
            [os.getppid()],
            node=place.node,
            interval_seconds=config.sample_seconds if place.local_rank == 0 else 0,
        )
        with sampler:
            reports = _train(config, folder, place, communicator, resumed, display, clock)
    own = reports[0] if place.rank == 0 else reports[-1]
    result = write_result(config, folder, reports) if place.rank == 0 else None
    return Outcome(folder, result, own.exit_code)


def main(arguments: list[str]) -> int:
    """A child of launch/team.py: `member CONFIG FOLDER new|resumed quiet|shown`."""
    tie_to_parent()
    config = from_mapping(read_json(Path(arguments[0]))["config"])
    folder = RunFolder(Path(arguments[1]))
    place = environment.detect()
    assert place is not None
    clock = PhaseClock()
    try:
        with _connection(config, place) as communicator:
            agree_on_config(config, communicator)
            resumed = folder if arguments[2] == "resumed" else None
            display = open_display(quiet=place.rank > 0 or arguments[3] == "quiet")
            reports = _train(config, folder, place, communicator, resumed, display, clock)
        return reports[0].exit_code if place.rank == 0 else reports[-1].exit_code
    except PacelineError as error:
        # Before training there is no report; the launcher reads this instead.
        failure = {"schema": SCHEMA, "cause": str(error), "exit_code": error.exit_code}
        write_json(folder.path / f"failure-{place.rank}.json", failure)
        return error.exit_code


@contextlib.contextmanager
def _connection(config: RunConfig, place: Place) -> Iterator[Communicator]:
    device = choose_device(config, place.local_rank)
    meeting = Meeting(
        place.rank,
        place.world_size,
        place.master_addr,
        place.master_port,
        timeout_seconds=config.rendezvous_seconds,
        serves_store=False if place.store_is_served else None,
        name="workers",
    )
    gpu = device if _has_own_gpu(place) and device.type == "cuda" else None
    with connect(meeting, gpu=gpu, timeout_seconds=config.timeout_seconds) as communicator:
        yield communicator


def _has_own_gpu(place: Place) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size


def agree_on_config(config: RunConfig, communicator: Communicator) -> RunConfig:
    """Refuse a worker that was started with other settings than the first one. Collective."""
    first = broadcast_json(communicator, config.to_dict())
    own = config.to_dict()
    problems = [
        f"{flag_of(item.name)}: rank {communicator.rank} was started with {own[item.name]!r},"
        f" rank 0 with {first[item.name]!r}: give all the same"
        for item in fields()
        if item.name not in OF_THIS_NODE and own[item.name] != first[item.name]
    ]
    refusals = gather_json(communicator, problems)
    # Everybody hears of a refusal, so that nobody waits for one who has left.
    told = broadcast_json(communicator, [text for some in refusals or [] for text in some])
    if told:
        raise ConfigError(told[:1] if communicator.rank else told)
    return config


def _agree_on_folder(
    config: RunConfig, resumed: RunFolder | None, communicator: Communicator
) -> RunFolder:
    """The first worker makes the run's folder; the others use or make one of the same name."""
    if resumed:
        return resumed
    folder = RunFolder.create(config) if communicator.rank == 0 else None
    name = broadcast_json(communicator, folder.id if folder else None)
    return folder or RunFolder.beside(config, name)


def _train(
    config: RunConfig,
    folder: RunFolder,
    place: Place,
    communicator: Communicator,
    resumed: RunFolder | None,
    display: Display,
    clock: PhaseClock,
) -> list[WorkerReport]:
    """The reports of all workers on the first one; elsewhere this worker's alone."""
    prepared = _prepare_in_turns(config, place, communicator)
    store = None
    if place.rank == 0:
        store = CheckpointStore(folder.checkpoints, config.checkpoint_keep, config.checkpoint_mode)
    checkpoint = _share_checkpoint(store, communicator) if resumed else None
    if place.rank == 0:
        folder.set_result_aside()
    team = Team(place, communicator, store)
    report = run_worker(config, folder, prepared, team, checkpoint, display, clock)
    _write_report(folder, place.rank, report)
    if report.status != "finished" and not (report.status == "stopped" and not report.is_echo):
        return [report]
    try:
        return _hand_in(folder, place, communicator, report)
    except PacelineError:
        return [report]


def _prepare_in_turns(config: RunConfig, place: Place, communicator: Communicator) -> Prepared:
    """The first of each node loads before the others, so that what it caches is made once."""
    if place.local_rank == 0:
        prepared = prepare(config, place.local_rank)
        communicator.barrier().wait()
        return prepared
    communicator.barrier().wait()
    return prepare(config, place.local_rank)


def _share_checkpoint(
    store: CheckpointStore | None, communicator: Communicator
) -> Checkpoint | None:
    """Rank 0 reads it; the others may be on machines that do not have the file."""
    packed = torch.empty(0, dtype=torch.uint8)
    header: dict[str, Any] = {}
    if store is not None:
        checkpoint = store.newest()
        assert checkpoint is not None
        buffer = io.BytesIO()
        torch.save(checkpoint.state, buffer)
        packed = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        header = {"size": packed.numel(), "iteration": checkpoint.iteration}
        broadcast_json(communicator, header)
        communicator.broadcast(packed, 0, "parameters").wait()
        return checkpoint
    header = broadcast_json(communicator, header)
    packed = torch.empty(header["size"], dtype=torch.uint8)
    communicator.broadcast(packed, 0, "parameters").wait()
    state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return Checkpoint(header["iteration"], state)


def _hand_in(
    folder: RunFolder, place: Place, communicator: Communicator, report: WorkerReport
) -> list[WorkerReport]:
    """Bring the reports and the other nodes' records to the first worker's folder. Collective."""
    reports = gather_json(communicator, dataclasses.asdict(report))
    is_shared = _is_same_folder(folder, communicator)
    for file in (folder.events_file(place.rank), folder.resources_file(place.node)):
        wanted = not is_shared and file.exists()
        contents = file.read_bytes() if wanted else b""
        payload = torch.frombuffer(bytearray(contents or b"\0"), dtype=torch.uint8)
        names = gather_json(communicator, file.name if contents else None)
        parts = gather_bytes(communicator, payload, "control")
        for name, part in zip(names or [], parts or [], strict=True):
            if name is not None and not (folder.path / name).exists():
                (folder.path / name).write_bytes(part.numpy().tobytes())
    if reports is None:
        return [report]
    for rank, values in enumerate(reports):
        write_json(folder.report_file(rank), {"schema": SCHEMA, **values})
    return [WorkerReport(**values) for values in reports]


def _is_same_folder(folder: RunFolder, communicator: Communicator) -> bool:
    """Whether this worker's folder is the very one of the first worker."""
    return bool(broadcast_json(communicator, folder.identity()) == folder.identity())


def _write_report(folder: RunFolder, rank: int, report: WorkerReport) -> None:
    with contextlib.suppress(OSError):
        write_json(folder.report_file(rank), {"schema": SCHEMA, **dataclasses.asdict(report)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
