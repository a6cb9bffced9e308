"""The end of a worker: its report, and its records on their way to the first worker's folder."""

from __future__ import annotations

import contextlib
import dataclasses
from time import monotonic, sleep

import torch

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_bytes, gather_json
from paceline.comm.place import Place
from paceline.errors import PeerError
from paceline.launch.store_files import is_acceptable
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.worker.report import WorkerReport

OTHERS_SECONDS = 3.0
"""How long the first worker waits, after a failure, for what the others say about it."""


def write_report(folder: RunFolder, rank: int, report: WorkerReport) -> None:
    with contextlib.suppress(OSError):
        write_json(folder.report_file(rank), {"schema": SCHEMA, **dataclasses.asdict(report)})


def read_reports(folder: RunFolder, workers: int) -> list[WorkerReport]:
    """Those that are there, in the ranks' order."""
    files = (folder.report_file(rank) for rank in range(workers))
    values = [read_json(file) for file in files if file.exists()]
    for value in values:
        del value["schema"]
    return [WorkerReport(**value) for value in values]


def clear_reports(folder: RunFolder, workers: int) -> None:
    for rank in range(workers):
        folder.report_file(rank).unlink(missing_ok=True)


def part_in_peace(communicator: Communicator, report: WorkerReport) -> bool:
    """Where the workers ended together, leave only when all have come so far. Collective then."""
    if report.is_together:
        with contextlib.suppress(PeerError):
            communicator.barrier().wait()
    return report.is_together


def hand_in(
    folder: RunFolder, place: Place, communicator: Communicator, report: WorkerReport
) -> list[WorkerReport] | None:
    """Bring all reports and the other nodes' records to the first worker, which gets the reports.

    None on the others, and on all of them where the workers did not end together.
    """
    if not part_in_peace(communicator, report):
        return None
    try:
        reports = gather_json(communicator, dataclasses.asdict(report))
        _hand_in_files(folder, place, communicator)
        communicator.barrier().wait()
    except PeerError:
        return None
    if place.local_rank == 0:
        clear_reports(folder, communicator.world_size)
    return [WorkerReport(**values) for values in reports] if reports else None


def _hand_in_files(folder: RunFolder, place: Place, communicator: Communicator) -> None:
    is_shared = broadcast_json(communicator, folder.identity()) == folder.identity()
    rank, node = place.rank, place.node
    for file in (folder.events_file(rank), folder.trace_file(rank), folder.resources_file(node)):
        wanted = not is_shared and file.exists()
        contents = file.read_bytes() if wanted else b""
        payload = torch.frombuffer(bytearray(contents or b"\0"), dtype=torch.uint8)
        names = gather_json(communicator, file.name if contents else None)
        parts = gather_bytes(communicator, payload, "control")
        for name, part in zip(names or [], parts or [], strict=True):
            if name is not None and is_acceptable(name):
                (folder.path / name).write_bytes(part.numpy().tobytes())


def collect_reports(folder: RunFolder, workers: int) -> list[WorkerReport]:
    """After a failure: what this machine's workers have written down, each as soon as it ended."""
    deadline = monotonic() + OTHERS_SECONDS
    while monotonic() < deadline and len(read_reports(folder, workers)) < workers:
        sleep(0.05)
    reports = read_reports(folder, workers)
    clear_reports(folder, workers)
    return reports
