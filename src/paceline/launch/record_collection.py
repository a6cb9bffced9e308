"""Collection of reports and record files on node 0.

Launchers of several nodes send files through the store (`send_files`, `receive_files`). Workers
that torchrun or srun started send them through the communicator (`collect_records`), reports from
memory, so that a full or slow shared disk does not lose them. Everything received is validated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.objects import gather_bytes, gather_json
from paceline.comm.rank_info import RankInfo
from paceline.errors import PeerError, RecordsError, RunError
from paceline.launch.messages import (
    Kinds,
    MalformedError,
    check_fields,
    clean,
    clean_cause,
    decode,
)
from paceline.launch.termination import STATUSES
from paceline.measure.kernel_time import KERNEL_TIME_KEYS
from paceline.measure.startup import STARTUP_PARTS
from paceline.measure.traffic import Count
from paceline.records import (
    BETWEEN_ITERATIONS,
    PHASES,
    SCHEMA,
    TRAFFIC_KINDS,
    RunFolder,
    explain_write_error,
    is_cuda_graph,
    is_memory,
    is_noise_scale,
    is_number,
    is_numerics,
    read_json,
    write_json,
)
from paceline.training.rank_report import RankReport

logger = logging.getLogger("paceline")

PART_BYTES = 256 << 10
"""Files are sent in parts of this size, so that slow links transmit heartbeats in between."""
FILES_MAX = 4096
"""A node sends a few files for each of its workers."""
PARTS_MAX = 1 << 16
"""16 GiB, far more than records need."""


def send_files(store: Store, node: int, folder: Path, names: Iterable[str]) -> None:
    """Send these files of a folder to node 0."""
    for key, part in parts_of(node, folder, names):
        store.set(key, part)  # type: ignore[arg-type]  # it takes both


def parts_of(node: int, folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Keys and values to set in the store, in this order, to send these files of a folder."""
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
    """Call `put` for each file that a node has sent, if it has.

    Only `expected` names are accepted. Anyone who reaches the port could have written others, which
    are ignored with a warning.
    """
    if not store.check([f"files/{node}"]):
        return
    try:
        listed = _check_list(decode(store.get(f"files/{node}"), f"file list of node {node}"), node)
    except MalformedError as error:
        logger.warning("%s", error)
        return
    for name, parts in listed.items():
        if name not in expected:
            logger.warning("ignored %.80r from node %d: not a file of that node", name, node)
            continue
        contents = _contents(store, node, name, parts)
        if contents is None:
            logger.warning("ignored %s from node %d: parts are missing", name, node)
        else:
            put(name, contents)


def _check_list(value: object, node: int) -> dict[str, int]:
    """The number of parts by file name."""
    what = f"file list of node {node}"
    if not isinstance(value, dict) or len(value) > FILES_MAX:
        raise MalformedError(what, "not a short list of files")
    for name, parts in value.items():
        is_count = isinstance(parts, int) and not isinstance(parts, bool)
        if not is_count or not 0 <= parts <= PARTS_MAX:
            raise MalformedError(what, f"bad number of parts of {name!r:.80}")
    return value


def _contents(store: Store, node: int, name: str, parts: int) -> bytes | None:
    """The contents of a file; None if a part is missing or too large."""
    contents = bytearray()
    for number in range(parts):
        key = f"file/{node}/{name}/{number}"
        # Getting a key that is not set would block.
        part = store.get(key) if store.check([key]) else None
        if part is None or len(part) > PART_BYTES:
            return None
        contents += part
    return bytes(contents)


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
"""Types of a report's fields, for reports that other nodes send."""
ACCOUNT: Kinds = {
    "rank": int,
    "node": int,
    "samples": (int, type(None)),
    "wall_seconds": NUMBER,
    "iteration_seconds": dict,
    "phases": dict,
    "hidden_exchange_seconds": NUMBER,
    "traffic": dict,
}
"""Types of its worker record; strategies may add fields."""
TIMES: Kinds = dict.fromkeys(("first", "mean", "median", "p95"), (*NUMBER, type(None)))
"""Types of its iteration times; None without iterations."""
LATER: Kinds = {
    "iterations": int,
    "phases": dict,
    "hidden_exchange_seconds": NUMBER,
    "bytes_sent": (dict, type(None)),
}
"""Types of its totals over the iterations after the first."""
ITERATION_PHASES = [name for name in PHASES if name not in BETWEEN_ITERATIONS]
COUNTS = [field.name for field in dataclasses.fields(Count)]
WARNINGS_MAX = 20
"""More would hide the result that they are shown with."""

OTHERS_SECONDS = 3.0
"""How long rank 0 waits, after a failure, for the reports of the others."""


def write_report(folder: RunFolder, rank: int, report: RankReport) -> None:
    with contextlib.suppress(OSError):
        write_json(folder.report_file(rank), {"schema": SCHEMA, **dataclasses.asdict(report)})


def read_reports(folder: RunFolder, ranks: Iterable[int]) -> list[RankReport]:
    """The existing reports of these ranks; a malformed one is ignored with a warning."""
    reports = []
    for rank in ranks:
        file = folder.report_file(rank)
        if not file.exists():
            continue
        try:
            values = read_json(file)
            del values["schema"]
            reports.append(parse_report(values, file.name, rank))
        except (MalformedError, RecordsError) as error:
            logger.warning("%s", error)
    return reports


def parse_report(value: object, what: str, rank: int) -> RankReport:
    """Validate the report of a rank, which another process wrote, perhaps on another machine."""
    values = check_fields(value, what, REPORT)
    if values["status"] not in ("finished", *STATUSES) or not 0 <= values["exit_code"] < 256:
        raise MalformedError(what, "no such status or exit code")
    if values["iterations"] < 0 or values["samples_before"] < 0:
        raise MalformedError(what, "a negative count")
    _check_account(values["worker"], what, rank)
    _check_history(values["history"], what)
    if not values["checkpoints"].keys() >= {"count", "bytes", "blocked_seconds"}:
        raise MalformedError(what, "bad value of checkpoints")
    if not all(map(is_number, values["checkpoints"].values())):
        raise MalformedError(what, "bad value of checkpoints")
    cause, warnings = values["cause"], values["warnings"]
    if not all(isinstance(each, str) for each in warnings):
        raise MalformedError(what, "bad value of warnings")
    if len(warnings) > WARNINGS_MAX:
        left_out = len(warnings) - WARNINGS_MAX
        warnings = [*warnings[:WARNINGS_MAX], f"rank {rank}: {left_out:,} more warnings"]
    cleaned = clean({**values, "cause": None, "warnings": warnings}, what)
    return RankReport(**{**cleaned, "cause": cause and clean_cause(cause, values["exit_code"])})


def _check_account(worker: dict[str, Any], what: str, rank: int) -> None:
    """Check the fields that results, summaries and reports compute with."""
    check_fields({name: worker.get(name) for name in ACCOUNT}, what, ACCOUNT)
    if worker["rank"] != rank or worker["node"] < 0:
        raise MalformedError(what, "no such rank or node")
    # A user's own loop may have batches whose samples cannot be counted.
    if (worker["samples"] or 0) < 0 or worker["wall_seconds"] <= 0:
        raise MalformedError(what, "bad value of samples or wall_seconds")
    _check_numbers(worker["phases"], f"{what}: phases", PHASES)
    check_fields(worker["iteration_seconds"], f"{what}: iteration_seconds", TIMES)
    check_fields(worker["traffic"], f"{what}: traffic", dict.fromkeys(TRAFFIC_KINDS, dict))
    for kind, count in worker["traffic"].items():
        _check_numbers(count, f"{what}: traffic of {kind}", COUNTS)
    if (later := worker.get("after_first")) is not None:
        check_fields(later, f"{what}: after_first", LATER)
        _check_numbers(later["phases"], f"{what}: phases after the first", ITERATION_PHASES)
        if later["bytes_sent"] is not None:
            _check_numbers(later["bytes_sent"], f"{what}: bytes after the first", TRAFFIC_KINDS)
        if later["iterations"] < 0:
            raise MalformedError(what, "a negative count")
    if (startup := worker.get("startup_seconds")) is not None:
        _check_numbers(startup, f"{what}: startup_seconds", STARTUP_PARTS)
    if (kernels := worker.get("kernel_time")) is not None:
        _check_numbers(kernels, f"{what}: kernel_time", KERNEL_TIME_KEYS)
    if "memory" in worker and not is_memory(worker["memory"]):
        raise MalformedError(what, "bad value of memory")
    if "numerics" in worker and not is_numerics(worker["numerics"]):
        raise MalformedError(what, "bad value of numerics")
    if "cuda_graph" in worker and not is_cuda_graph(worker["cuda_graph"]):
        raise MalformedError(what, "bad value of cuda_graph")
    if "noise_scale" in worker and not is_noise_scale(worker["noise_scale"]):
        raise MalformedError(what, "bad value of noise_scale")


def _check_numbers(value: object, what: str, names: Iterable[str]) -> None:
    check_fields(value, what, dict.fromkeys(names, NUMBER))


def _check_history(history: list[object], what: str) -> None:
    for entry in history:
        if not isinstance(entry, dict):
            raise MalformedError(what, "bad value of history")
        if not all(is_number(entry.get(name)) for name in ("iteration", "epoch", "seconds")):
            raise MalformedError(what, "bad value of history")
        metrics = entry.get("metrics", {})
        if not isinstance(metrics, dict):
            raise MalformedError(what, "bad value of metrics")
        values = [value for name, value in entry.items() if name != "metrics"]
        if not all(value is None or is_number(value) for value in (*values, *metrics.values())):
            raise MalformedError(what, "bad value of history")


def put_record(folder: RunFolder, name: str, contents: bytes) -> None:
    """Write a file from another node; a malformed report is ignored with a warning."""
    if name.startswith("report-"):
        try:
            # Its size is limited by the number of parts; a long run has many evaluations.
            value = decode(contents, name, bytes_max=None)
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


def final_barrier(communicator: Communicator, report: RankReport) -> bool:
    """If the workers ended together, wait until all have reached this point. Collective then."""
    if report.is_together:
        with contextlib.suppress(PeerError):
            communicator.barrier().wait()
    return report.is_together


def collect_records(
    folder: RunFolder,
    rank_info: RankInfo,
    communicator: Communicator,
    report: RankReport,
    shares_folder: bool,
) -> list[RankReport] | None:
    """Collect the reports of all ranks and the records of other nodes on rank 0.

    Returns the reports on rank 0; None on the others, and on all if they did not end together.
    `shares_folder`: whether the folder is that of rank 0.
    """
    if not final_barrier(communicator, report):
        return None
    payload = json.dumps(dataclasses.asdict(report)).encode()
    try:
        gathered = gather_bytes(
            communicator, torch.frombuffer(bytearray(payload), dtype=torch.uint8), "control"
        )
        _collect_files(folder, rank_info, communicator, shares_folder)
        communicator.barrier().wait()
    except PeerError:
        return None
    reports = None if gathered is None else parse_gathered(gathered)
    if cleans_folder(rank_info, shares_folder):
        folder.remove_transient(map(folder.report_file, range(rank_info.world_size)))
    return reports


def cleans_folder(rank_info: RankInfo, shares_folder: bool) -> bool:
    """Whether this rank removes files from its folder: exactly one rank does, after reading."""
    return rank_info.rank == 0 or (rank_info.local_rank == 0 and not shares_folder)


def parse_gathered(gathered: Iterable[torch.Tensor]) -> list[RankReport]:
    """Decode reports in rank order; malformed ones are ignored."""
    reports = []
    for rank, packed in enumerate(gathered):
        what = f"report of rank {rank}"
        try:
            value = decode(packed.numpy().tobytes(), what, bytes_max=None)
            reports.append(parse_report(value, what, rank))
        except MalformedError as error:
            logger.warning("%s", error)
    return reports


def _collect_files(
    folder: RunFolder, rank_info: RankInfo, communicator: Communicator, shares_folder: bool
) -> None:
    rank, node = rank_info.rank, rank_info.node_rank
    for file in (folder.events_file(rank), folder.trace_file(rank), folder.resources_file(node)):
        kind = file.name.partition("-")[0]
        # The folder may have been removed; writing the result reports that.
        wanted = not shares_folder and file.exists()
        contents = file.read_bytes() if wanted else b""
        payload = torch.frombuffer(bytearray(contents or b"\0"), dtype=torch.uint8)
        names = gather_json(communicator, file.name if contents else None)
        parts = gather_bytes(communicator, payload, "control")
        for sender, (name, part) in enumerate(zip(names or [], parts or [], strict=True)):
            if name is None:
                continue
            # Rank 0 already has the files of its own node.
            numbers = range(1, rank_info.nnodes) if kind == "resources" else [sender] * bool(sender)
            if name in [f"{kind}-{number}{file.suffix}" for number in numbers]:
                put_record(folder, name, part.numpy().tobytes())
            else:
                logger.warning("ignored %.80r from rank %d", name, sender)


def collect_reports(folder: RunFolder, workers: int, expected: int) -> list[RankReport]:
    """After a failure: the reports that workers have written to this folder.

    Waits a few seconds for `expected` of them.
    """
    deadline = monotonic() + OTHERS_SECONDS
    files = [folder.report_file(rank) for rank in range(workers)]
    while monotonic() < deadline and sum(file.exists() for file in files) < expected:
        sleep(0.05)
    reports = read_reports(folder, range(workers))
    folder.remove_transient(files)
    return reports
