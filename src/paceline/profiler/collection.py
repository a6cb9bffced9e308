"""The end of a profile: result.json from the event files of all ranks.

Everything is read from files, because a process that was killed leaves nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import RunSettings
from paceline.formatting import format_ranks
from paceline.measure.machine import cores_usable, hardware, software
from paceline.measure.resources import summarize
from paceline.profiler import POST_MORTEM_FILE, WARNINGS_FILE
from paceline.profiler.collectives.communication import Communication, read_communication
from paceline.profiler.post_mortem.end_of_rank import add_last_interval, find_last_wait
from paceline.profiler.post_mortem.examination import add_resumption, joined_records
from paceline.profiler.recording_windows import WINDOW_STEPS
from paceline.profiler.trace import write_traces
from paceline.records import (
    BETWEEN_ITERATIONS,
    PHASES,
    SCHEMA,
    TRAFFIC_KINDS,
    Result,
    RunFolder,
    read_lines,
    summarize_iterations,
)

TRANSIENT = ("process-*.jsonl", "stacks-*.txt", POST_MORTEM_FILE)
"""Files that are part of the result, or that matter only while the processes run."""

NO_STEPS = (
    "no training step was measured: training must use an optimizer of torch, or call"
    " paceline.step(), in a Python environment that has paceline installed"
)

ENDED_BEFORE_STEPS = {
    "failed": "no training step was measured: the program failed before its first one",
    "stopped": "no training step was measured: the program was stopped before its first one",
}

LOSSES_IN_MEAN = 100
"""`final.train_loss` is the mean over this many of the last steps, as in `paceline train`. If none
of them was recorded, it is that of the last window that was."""


@dataclass(slots=True)
class RankRecord:
    """What one rank wrote since it last started."""

    start: Mapping[str, Any]
    blocks: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of steps, in order."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    """All other events."""
    starts: int = 1
    """Processes of this rank, one after the other; the records are those of the last."""

    @property
    def rank(self) -> int:
        return int(self.start["rank"])

    @property
    def last(self) -> Mapping[str, Any]:
        """The block with the totals."""
        return self.blocks[-1]

    @property
    def step_seconds(self) -> list[float]:
        return [seconds for block in self.blocks for seconds in block["seconds"]]

    @property
    def losses(self) -> list[float]:
        """Of recorded steps."""
        return [loss for block in self.blocks for loss in block["loss"] if loss is not None]

    @property
    def last_losses(self) -> list[float]:
        """Of the last steps."""
        losses = [loss for block in self.blocks for loss in block["loss"]]
        last = [loss for loss in losses[-LOSSES_IN_MEAN:] if loss is not None]
        return last or self.losses[-WINDOW_STEPS:]

    @property
    def wall_seconds(self) -> float:
        return float(sum(self.last["phases"].values()))

    @property
    def training_seconds(self) -> float:
        """The wall time without start-up, in which there is nothing to measure."""
        return max(1e-9, self.wall_seconds - self._startup_seconds().get("preparation", 0.0))

    @property
    def has_ended(self) -> bool:
        """Whether it recorded everything up to its end; not if it was killed."""
        return any(event["event"] == "end" for event in self.events)

    @property
    def has_finished(self) -> bool:
        """Whether it recorded all that was to be measured."""
        return any(
            event["event"] == "end" and event["status"] == "finished" for event in self.events
        )

    @property
    def moments(self) -> dict[str, float]:
        """Start of the measurement, and ends of the first and the last step, by its clock."""
        started = float(self.start["clock_started"])
        first = sum(self.blocks[0]["after_first"].values())
        return {"start": started, "first": started + first, "last": started + self.wall_seconds}

    @property
    def interruptions(self) -> list[list[float]]:
        """Evaluation and checkpoints, by its clock: communication in them is part of them."""
        return [each for block in self.blocks for each in block.get("interruptions", ())]

    @property
    def host_to_device(self) -> dict[str, float] | None:
        """Copies to the GPU by all lines; None if there are none."""
        facts = [one for one in self.events if "copies" in one]
        if not facts or not facts[-1]["copies"]:
            return None
        names = ("count", "bytes", "pageable_bytes", "seconds", "gpu_seconds")
        totals = {name: sum(site[name] for site in facts[-1]["copies"]) for name in names}
        return {"iterations": int(facts[-1]["copies_steps"]), **totals}

    def account(self) -> dict[str, Any]:
        """The entry of the rank in `workers` of result.json, without its communication."""
        seconds, phases = self.step_seconds, dict(self.last["phases"])
        before = self.blocks[0]["after_first"]
        hidden = 0.0 if self.start["workers"] == 1 else None
        copies, paused = self.host_to_device, int(self.last.get("paused_steps", 0))
        recorded = {"steps": len(seconds) - paused, "of": len(seconds)}
        return {
            "rank": self.rank,
            "node": int(self.start["node"]),
            "samples": int(self.last["samples"]),
            "wall_seconds": self.wall_seconds,
            "iteration_seconds": summarize_iterations(seconds),
            "phases": phases,
            "startup_seconds": self._startup_seconds(),
            "hidden_exchange_seconds": hidden,
            "after_first": {
                "iterations": len(seconds) - 1,
                "phases": {
                    name: phases[name] - before[name]
                    for name in PHASES
                    if name not in BETWEEN_ITERATIONS
                },
                "hidden_exchange_seconds": hidden,
            },
            "traffic": {
                kind: {"bytes_sent": 0, "bytes_received": 0, "messages": 0, "seconds": 0.0}
                for kind in TRAFFIC_KINDS
            },
            **({"host_to_device": copies} if copies else {}),
            **({"steps_recorded": recorded} if paused else {}),
        }

    def _startup_seconds(self) -> dict[str, float]:
        """The part of `other` before the first step, and what precedes the clock.

        Empty if the measurement began later.
        """
        if self.start.get("skipped_steps"):
            return {}
        before = self.blocks[0]["after_first"]
        outside = sum(before.values()) - self.step_seconds[0]
        preparation = outside - before["evaluate"] - before["checkpoint"]
        return {
            "imports": float(self.start.get("imports_seconds", 0.0)),
            "preparation": max(0.0, min(preparation, before["other"])),
        }


def settings_of_command(
    command: Sequence[str], name: str | None, steps: str, *, has_trace: bool = False
) -> RunSettings:
    """The settings of a profile; those besides `command` only if they were given."""
    given = {"name": name, "steps": steps, "trace": has_trace}
    values = {key: value for key, value in given.items() if value}
    return RunSettings("profile", {"command": list(command), **values})


def read_ranks(folder: RunFolder) -> list[RankRecord]:
    """The records of all ranks that took a step, in order."""
    files = folder.path.glob("events-*.jsonl")
    numbered = [file for file in files if re.fullmatch(r"events-\d+\.jsonl", file.name)]
    records = map(_read_rank, numbered)
    return sorted(filter(None, records), key=lambda record: record.rank)


def _read_rank(file: Path) -> RankRecord | None:
    record: RankRecord | None = None
    for event in read_lines(file):
        if event.get("event") == "start":
            record = RankRecord(event, starts=record.starts + 1 if record else 1)
        elif record is not None:
            is_block = event.get("event") == "iterations"
            (record.blocks if is_block else record.events).append(event)
    return record if record is not None and record.blocks else None


def write_result(
    folder: RunFolder,
    settings: RunSettings,
    status: str,
    cause: str | None,
    warnings: Iterable[str] = (),
    post_mortem: Sequence[Mapping[str, Any]] = (),
    ends: Mapping[int, float] | None = None,
    command_seconds: float | None = None,
) -> Result:
    """Write result.json and return its contents.

    `ends`: when processes ended, as time of day, by process id. `command_seconds`: of the whole
    command, if there is one.
    """
    ranks = read_ranks(folder)
    communication = read_communication(folder)
    workers = make_workers(ranks, communication, ends or {})
    result = assemble(folder, settings, ranks, workers, status, cause)
    if command_seconds is not None:
        result["command_seconds"] = command_seconds
    result["warnings"] = [
        *warnings,
        *_warnings(folder, ranks, status),
        *communication.warnings(ranks[0].start["workers"] if ranks else 0),
    ]
    if post_mortem:
        result["post_mortem"] = [dict(report) for report in post_mortem]
    if status == "finished":
        step_times = [block["time"] for rank in ranks for block in rank.blocks]
        for report in result.get("post_mortem", ()):
            add_resumption(report, list(communication.logs.values()), step_times)
    try:
        write_traces(folder, ranks, communication)
    except OSError as error:
        result["warnings"].append(f"the trace is missing: {error.strerror}")
    folder.write_result(result)
    for pattern in (WARNINGS_FILE, *TRANSIENT):
        for path in folder.path.glob(pattern):
            path.unlink(missing_ok=True)
    return result


def is_empty(result: Result) -> bool:
    """Whether nothing was measured, and no rank waited for another one.

    That a rank failed before its first step is for the program to say.
    """
    reports = result.get("post_mortem", ())
    return not result["workers"] and all(
        report["event"] == "death" and not report["mismatches"] for report in reports
    )


def discard_if_empty(folder: RunFolder, result: Result) -> None:
    """Remove the folder of a profile that measured nothing, so that its name can be used again."""
    if is_empty(result):
        patterns = (
            "result.json",
            "resources-*.jsonl",
            "collectives-*.*",
            WARNINGS_FILE,
            *TRANSIENT,
        )
        folder.discard([file for pattern in patterns for file in folder.path.glob(pattern)])


def read_so_far(folder: RunFolder, settings: RunSettings) -> Result:
    """What the result would be if the command, which is still running, ended now."""
    ranks = read_ranks(folder)
    workers = make_workers(ranks, read_communication(folder), {})
    return assemble(folder, settings, ranks, workers, "running", None)


def make_workers(
    ranks: Sequence[RankRecord], communication: Communication, ends: Mapping[int, float]
) -> list[dict[str, Any]]:
    """`workers` of result.json."""
    workers = []
    caused: dict[int, float] = {}
    for rank in ranks:
        worker, moments = rank.account(), rank.moments
        own = communication.ranks.get(rank.rank)
        if own is not None:
            records = own.log.records
            if not rank.has_finished:
                records = joined_records(communication.logs, own.log)
            waits = own.account(worker, moments, records, rank.interruptions)
            for other, seconds in waits.items():
                caused[other] = caused.get(other, 0.0) + seconds
        if not rank.has_finished:
            # Of a rank on another machine, the end is not known.
            ended = ends.get(rank.start["process"], 0.0) - rank.start["perf_counter_offset"]
            if rank.has_ended:
                # What follows is the exit of the process, as of a rank that finished.
                ended = 0.0
            wait = find_last_wait(communication.logs, rank.rank)
            waited = own.waits.waited[rank.rank] if own is not None else None
            add_last_interval(worker, moments["last"], max(moments["last"], ended), wait, waited)
        workers.append(worker)
    for worker in workers:
        if worker["rank"] in communication.ranks:
            worker["caused_wait_seconds"] = caused.get(worker["rank"], 0.0)
    return workers


def assemble(
    folder: RunFolder,
    settings: RunSettings,
    ranks: Sequence[RankRecord],
    workers: list[dict[str, Any]],
    status: str,
    cause: str | None,
) -> Result:
    first = ranks[0] if ranks else None
    world_size = first.start["workers"] if first else 0
    nodes = [summarize(folder.resources_file(0), 0, _training_interval(first))]
    settings = RunSettings("profile", {**settings.values, "world_size": max(1, world_size)})
    return {
        "schema": SCHEMA,
        "id": folder.id,
        "status": status,
        "cause": cause,
        **settings.to_record(),
        "software": software(),
        "hardware": hardware(),
        "wall_seconds": max((worker["wall_seconds"] for worker in workers), default=0.0),
        "iterations": len(first.step_seconds) if first else 0,
        "samples": sum(worker["samples"] for worker in workers),
        "weights_sha256": None,
        "final": {"train_loss": _train_loss(ranks), "test_loss": None, "test_accuracy": None},
        "metrics": {},
        "seconds_to_target": None,
        "history": [],
        "workers": workers,
        "nodes": nodes,
        "checkpoints": {
            "count": first.last["checkpoints"] if first else 0,
            "bytes": None,
            "blocked_seconds": first.last["phases"]["checkpoint"] if first else 0.0,
        },
        "measurement_overhead": overhead_of(ranks, nodes[0]),
    }


def _training_interval(first: RankRecord | None) -> tuple[float, float] | None:
    if first is None or len(first.blocks) < 2:
        return None
    return first.blocks[0]["time"], first.last["time"]


def _train_loss(ranks: Iterable[RankRecord]) -> float | None:
    """The mean over all ranks of their last losses."""
    losses = [loss for rank in ranks for loss in rank.last_losses]
    return sum(losses) / len(losses) if losses else None


def overhead_of(ranks: Sequence[RankRecord], node: Mapping[str, Any]) -> dict[str, float]:
    """The fraction of the training time spent on measuring: in the script, and by the sampler.

    `host` is all of the script's part, also what passes while a GPU works.
    """
    in_loop, host = (
        max((rank.last.get(key, 0.0) / rank.training_seconds for rank in ranks), default=0.0)
        for key in ("measuring_seconds", "measuring_host_seconds")
    )
    sampler = (node["sampler_cpu_percent"] or 0.0) / 100 / cores_usable()
    return {"fraction": in_loop + sampler, "in_loop": in_loop, "host": host, "sampler": sampler}


def _warnings(folder: RunFolder, ranks: Sequence[RankRecord], status: str) -> list[str]:
    """What the ranks reported, each once, and ranks without records."""
    events = [event for rank in ranks for event in rank.events if event["event"] == "warning"]
    events += read_lines(folder.path / WARNINGS_FILE)
    texts = list(dict.fromkeys(str(event["text"]) for event in events))
    if (starts := max((rank.starts for rank in ranks), default=1)) > 1:
        texts.append(f"the ranks started {starts} times: the result is that of the last start")
    # A script may take steps, but none of those that --steps selects.
    if not ranks and not any("steps" in event for event in events):
        texts.append(ENDED_BEFORE_STEPS.get(status, NO_STEPS))
    known = {rank.rank for rank in ranks}
    world_size = ranks[0].start["workers"] if ranks else 0
    missing = [rank for rank in range(world_size) if rank not in known]
    if missing:
        texts.append(f"no records from {format_ranks(missing)}: totals do not include them")
    return texts
