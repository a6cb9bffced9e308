"""Files on their way to the first node, through the store at which the nodes meet.

The end of a worker: its report, and its records on their way to the first worker's folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_bytes, gather_json
from paceline.comm.rank_info import RankInfo
from paceline.errors import PeerError, RunError
from paceline.launch.messages import Kinds, MalformedError, check_fields, decode, printable
from paceline.launch.termination import STATUSES
from paceline.records import SCHEMA, RunFolder, explain_write_error, read_json, write_json
from paceline.training.rank_report import RankReport

logger = logging.getLogger("paceline")

PART_BYTES = 256 << 10
"""A file travels in parts of this size, which slow links carry between two signs of life."""
FILES_MAX = 4096
"""A node hands in a few files for each of its workers."""
PARTS_MAX = 1 << 16
"""16 GiB, far beyond what records take."""


def send_files(store: Store, node: int, folder: Path, names: Iterable[str]) -> None:
    """Hand in these files of a folder."""
    for key, part in parts_of(node, folder, names):
        store.set(key, part)  # type: ignore[arg-type]  # it takes both


def parts_of(node: int, folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """What a node has to set in the store, in this order, to hand in these files of a folder."""
    parts = {}
    for name in names:
        contents = (folder / name).read_bytes()
        begins = range(0, len(contents), PART_BYTES)
        for number, begin in enumerate(begins):
            yield f"file/{node}/{name}/{number}", contents[begin : begin + PART_BYTES]
        parts[name] = len(begins)
    yield f"files/{node}", json.dumps(parts).encode()


def receive_files(
    store: Store, node: int, put: Callable[[str, bytes], object], expected: Container[str]
) -> None:
    """`put` what a node has handed in, file by file; nothing where it has not.

    Only `expected` names are taken. Anyone who reaches the port could have written the rest, which
    is ignored with a warning: the run is none the worse for it.
    """
    if not store.check([f"files/{node}"]):
        return
    try:
        listed = _listed(decode(store.get(f"files/{node}"), f"file list of node {node}"), node)
    except MalformedError as error:
        logger.warning("%s", error)
        return
    for name, parts in listed.items():
        if name not in expected:
            logger.warning(
                "ignored %.80r handed in by node %d: not a file of that node", name, node
            )
            continue
        contents = _contents(store, node, name, parts)
        if contents is None:
            logger.warning("ignored %s from node %d: parts are missing", name, node)
        else:
            put(name, contents)


def _listed(value: object, node: int) -> dict[str, int]:
    """Numbers of parts by file name."""
    what = f"file list of node {node}"
    if not isinstance(value, dict) or len(value) > FILES_MAX:
        raise MalformedError(what, "not a short list of files")
    for name, parts in value.items():
        is_count = isinstance(parts, int) and not isinstance(parts, bool)
        if not is_count or not 0 <= parts <= PARTS_MAX:
            raise MalformedError(what, f"bad number of parts of {name!r:.80}")
    return value


def _contents(store: Store, node: int, name: str, parts: int) -> bytes | None:
    """None where a part is missing or too large."""
    contents = bytearray()
    for number in range(parts):
        key = f"file/{node}/{name}/{number}"
        # To get a key that is not there would wait for it.
        part = store.get(key) if store.check([key]) else None
        if part is None or len(part) > PART_BYTES:
            return None
        contents += part
    return bytes(contents)


def record_names(folder: RunFolder, ranks: Iterable[int], nodes: Iterable[int]) -> set[str]:
    """The names of the files that workers of these ranks, on these nodes, hand in."""
    files = [folder.resources_file(node) for node in nodes]
    for rank in ranks:
        files += [folder.events_file(rank), folder.report_file(rank), folder.trace_file(rank)]
    return {file.name for file in files}


logger = logging.getLogger("paceline")

NUMBER = (int, float)
REPORT: Kinds = {
    "status": str,
    "cause": (str, type(None)),
    "exit_code": int,
    "is_secondary": bool,
    "ended": NUMBER,
    "is_together": bool,
    "iterations": int,
    "weights_sha256": (str, type(None)),
    "train_loss": (*NUMBER, type(None)),
    "seconds_to_target": (*NUMBER, type(None)),
    "history": list,
    "worker": dict,
    "checkpoints": dict,
    "measuring_fraction": NUMBER,
    "warnings": list,
    "samples_before": int,
}
"""Types of a report's fields, for those that other nodes send."""
ACCOUNT: Kinds = {
    "rank": int,
    "node": int,
    "samples": int,
    "wall_seconds": NUMBER,
    "iteration_seconds": dict,
    "phases": dict,
    "hidden_exchange_seconds": NUMBER,
    "traffic": dict,
}
"""Those of its account of the worker; strategies may add others."""

OTHERS_SECONDS = 3.0
"""How long the first worker waits, after a failure, for what the others say about it."""


def write_report(folder: RunFolder, rank: int, report: RankReport) -> None:
    with contextlib.suppress(OSError):
        write_json(folder.report_file(rank), {"schema": SCHEMA, **dataclasses.asdict(report)})


def read_reports(folder: RunFolder, workers: int) -> list[RankReport]:
    """Those that are there, in the ranks' order."""
    files = (folder.report_file(rank) for rank in range(workers))
    found = {file.name: read_json(file) for file in files if file.exists()}
    for value in found.values():
        del value["schema"]
    return [parse_report(value, name) for name, value in found.items()]


def parse_report(value: object, what: str, rank: int | None = None) -> RankReport:
    """A report that another process wrote, perhaps on another machine, of this rank if given."""
    values = check_fields(value, what, REPORT)
    worker = values["worker"]
    account = {name: worker.get(name) for name in ACCOUNT}
    check_fields(account, what, ACCOUNT)
    if values["status"] not in ("finished", *STATUSES) or rank not in (None, worker["rank"]):
        raise MalformedError(what, "no such status or rank")
    if not all(isinstance(each, dict) for each in values["history"]):
        raise MalformedError(what, "bad value of history")
    if not all(isinstance(each, str) for each in values["warnings"]):
        raise MalformedError(what, "bad value of warnings")
    cause = values["cause"]
    return RankReport(**{**values, "cause": cause and printable(cause)})


def put_record(folder: RunFolder, name: str, contents: bytes) -> None:
    """Write a file that another node handed in; a malformed report is ignored with a warning."""
    if name.startswith("report-"):
        try:
            value = decode(contents, name)
            if isinstance(value, dict):
                value.pop("schema", None)
            rank = int(name.removeprefix("report-").removesuffix(".json"))
            parse_report(value, name, rank)
        except MalformedError as error:
            logger.warning("%s", error)
            return
    file = folder.path / name
    try:
        file.write_bytes(contents)
    except OSError as error:
        raise RunError(explain_write_error(file, error)) from None


def clear_reports(folder: RunFolder, workers: int) -> None:
    for rank in range(workers):
        folder.report_file(rank).unlink(missing_ok=True)


def final_barrier(communicator: Communicator, report: RankReport) -> bool:
    """Where the workers ended together, leave only when all have come so far. Collective then."""
    if report.is_together:
        with contextlib.suppress(PeerError):
            communicator.barrier().wait()
    return report.is_together


def collect_records(
    folder: RunFolder, place: RankInfo, communicator: Communicator, report: RankReport
) -> list[RankReport] | None:
    """Bring all reports and the other nodes' records to the first worker, which gets the reports.

    None on the others, and on all of them where the workers did not end together.
    """
    if not final_barrier(communicator, report):
        return None
    try:
        reports = gather_json(communicator, dataclasses.asdict(report))
        _hand_in_files(folder, place, communicator)
        communicator.barrier().wait()
    except PeerError:
        return None
    if place.local_rank == 0:
        clear_reports(folder, communicator.world_size)
    if not reports:
        return None
    return [parse_report(value, f"report of rank {rank}") for rank, value in enumerate(reports)]


def _hand_in_files(folder: RunFolder, place: RankInfo, communicator: Communicator) -> None:
    # Somebody may have removed the folder meanwhile; whoever writes the result says so.
    identity = folder.identity() if folder.config_file.is_file() else None
    is_shared = broadcast_json(communicator, identity) == identity
    rank, node = place.rank, place.node
    for file in (folder.events_file(rank), folder.trace_file(rank), folder.resources_file(node)):
        kind = file.name.partition("-")[0]
        wanted = not is_shared and file.exists()
        contents = file.read_bytes() if wanted else b""
        payload = torch.frombuffer(bytearray(contents or b"\0"), dtype=torch.uint8)
        names = gather_json(communicator, file.name if contents else None)
        parts = gather_bytes(communicator, payload, "control")
        for sender, (name, part) in enumerate(zip(names or [], parts or [], strict=True)):
            if name is None:
                continue
            # The first node's own files are here already, and nobody else has them.
            numbers = range(1, place.nnodes) if kind == "resources" else [sender] * bool(sender)
            if name in [f"{kind}-{number}{file.suffix}" for number in numbers]:
                put_record(folder, name, part.numpy().tobytes())
            else:
                logger.warning("ignored %.80r handed in by rank %d", name, sender)


def collect_reports(folder: RunFolder, workers: int) -> list[RankReport]:
    """After a failure: what this machine's workers have written down, each as soon as it ended."""
    deadline = monotonic() + OTHERS_SECONDS
    while monotonic() < deadline and len(read_reports(folder, workers)) < workers:
        sleep(0.05)
    reports = read_reports(folder, workers)
    clear_reports(folder, workers)
    return reports
