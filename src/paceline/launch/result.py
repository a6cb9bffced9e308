"""The end of a run: result.json from the reports of all workers and the samples of all nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import RunConfig, RunSettings
from paceline.emulation.state import cluster_record
from paceline.errors import RunError, UsageError
from paceline.formatting import format_ranks
from paceline.launch.messages import MalformedError, clean
from paceline.launch.termination import Termination, root_cause
from paceline.measure.machine import cores_usable, hardware, software
from paceline.measure.resources import summarize
from paceline.measure.trace_file import merge_traces
from paceline.records import SCHEMA, Result, RunFolder, is_number, read_lines
from paceline.training.rank_report import RankReport

logger = logging.getLogger("paceline")


class RunOutcome(NamedTuple):
    folder: RunFolder
    result: Result | None
    """None in a process that is one of several workers or nodes; rank 0 has the result."""
    exit_code: int


def finish_run(
    config: RunConfig,
    folder: RunFolder,
    reports: list[RankReport],
    termination: Termination | None,
    *,
    is_new: bool,
    records: Iterable[Path],
    sampler_warning: str | None = None,
    is_first: bool = True,
    **more: Any,
) -> RunOutcome:
    """End a run on one node: write the result, or discard the folder of a rejected run.

    `records` are the files to discard; `more` are keys that only some launchers add to the result.
    """
    if termination and is_rejection(termination, reports, is_new):
        # Nothing was trained: a rejected run leaves no files, and its name stays free.
        if is_new:
            folder.discard(records)
        raise termination.error()
    if not is_first:
        if termination:
            raise termination.error()
        return RunOutcome(folder, None, 0)
    if sampler_warning and reports:
        reports[0].warnings.append(sampler_warning)
    result = write_result(RunSettings.of(config), folder, reports, termination, **more)
    return RunOutcome(folder, result, termination.exit_code if termination else 0)


def is_rejection(termination: Termination, reports: list[RankReport], is_new: bool) -> bool:
    """Whether the run was rejected before training; a strategy may reject a model only then."""
    if reports and is_new and termination.exit_code == UsageError.exit_code:
        return not any(report.iterations for report in reports)
    return not reports and termination.exit_code != RunError.exit_code


def write_result(
    settings: RunSettings,
    folder: RunFolder,
    reports: list[RankReport],
    termination: Termination | None = None,
    **more: Any,
) -> Result:
    """Write result.json. `termination` is the launcher's root cause; without it, the reports'.

    `more` are keys that only some launchers add.
    """
    result = {**assemble(settings, folder, reports, termination), **more}
    try:
        merge_traces(folder, [report.worker["rank"] for report in reports])
    except OSError as error:
        result["warnings"].append(f"the trace of all ranks is missing: {error.strerror}")
    try:
        folder.write_result(result)
    except RunError as error:
        # The cause that ended the run comes first, because this may be its consequence.
        cause = f"{result['cause']}; " if result["cause"] else ""
        raise RunError(f"{cause}{error}") from None
    return result


def assemble(
    settings: RunSettings,
    folder: RunFolder,
    reports: list[RankReport],
    termination: Termination | None = None,
) -> Result:
    first = reports[0] if reports else None
    termination = termination or first_cause(reports) or _missing_report(reports)
    training = training_interval(folder)
    nodes = [_summarize_node(folder, node, training) for node in range(settings.nnodes)]
    history = first.history if first else []
    last = history[-1] if history else {}
    cluster = cluster_record()
    return {
        "schema": SCHEMA,
        "id": folder.id,
        "status": termination.status if termination else "finished",
        "cause": termination.cause if termination else None,
        "is_loss": bool(termination and termination.is_loss),
        **settings.to_record(),
        "software": software(),
        "hardware": hardware(),
        "wall_seconds": max((report.worker["wall_seconds"] for report in reports), default=0.0),
        "iterations": first.iterations if first else 0,
        "samples": _samples(reports),
        "weights_sha256": first.weights_sha256 if first else None,
        "final": {
            "train_loss": mean_train_loss(reports),
            "test_loss": last.get("test_loss"),
            "test_accuracy": last.get("test_accuracy"),
        },
        # Checkpoints of earlier versions have no metrics in their history.
        "metrics": last.get("metrics", {}),
        "seconds_to_target": first.seconds_to_target if first else None,
        "history": history,
        "workers": [report.worker for report in reports],
        "nodes": nodes,
        "checkpoints": first.checkpoints
        if first
        else {"count": 0, "bytes": 0, "blocked_seconds": 0.0},
        "measurement_overhead": measurement_overhead(reports, nodes),
        **({"cluster": cluster} if cluster else {}),
        "warnings": [
            *(cluster["warnings"] if cluster else []),
            *dict.fromkeys(text for report in reports for text in report.warnings),
            *_missing_records(settings, reports, termination),
        ],
    }


def training_interval(folder: RunFolder) -> tuple[float, float] | None:
    """When rank 0 wrote its first and its last block of iterations; None with fewer than two."""
    times = [
        event["time"]
        for event in read_lines(folder.events_file(0))
        if event.get("event") == "iterations" and is_number(event.get("time"))
    ]
    return (times[0], times[-1]) if len(times) > 1 else None


def _summarize_node(
    folder: RunFolder, node: int, training: tuple[float, float] | None
) -> dict[str, Any]:
    """Summarize the samples of a node; empty if the file, which it sent, is malformed."""
    file = folder.resources_file(node)
    try:
        summary: dict[str, Any] = clean(summarize(file, node, training), file.name)
        figures = (value for name, value in summary.items() if name != "gpus")
        if not all(value is None or is_number(value) for value in figures):
            raise MalformedError(file.name, "not all are numbers")
    except (MalformedError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        logger.warning("ignored %s: its samples are malformed", file.name)
        return summarize(file.with_suffix(".none"), node)
    return summary


def first_cause(reports: list[RankReport]) -> Termination | None:
    """Why the run did not finish, by the reports of its workers."""
    unfinished = [report for report in reports if report.status != "finished"]
    return root_cause(Termination.of_report(report) for report in unfinished)


def _missing_records(
    settings: RunSettings, reports: list[RankReport], termination: Termination | None
) -> list[str]:
    """A warning for a finished run whose records are incomplete; after a failure, none."""
    known = {report.worker["rank"] for report in reports}
    missing = [rank for rank in range(settings.workers) if rank not in known]
    if termination or not missing:
        return []
    return [f"no records from {format_ranks(missing)}: totals do not include them"]


def _missing_report(reports: list[RankReport]) -> Termination | None:
    """A run without a report of rank 0 did not finish."""
    if any(report.worker["rank"] == 0 for report in reports):
        return None
    return Termination("rank 0 ended without a report")


def _samples(reports: list[RankReport]) -> int | None:
    """The samples of all workers; None if they cannot be counted."""
    counts = [report.worker["samples"] for report in reports]
    before = reports[0].samples_before if reports else 0
    return None if None in counts else sum(counts) + before


def mean_train_loss(reports: list[RankReport]) -> float | None:
    """The mean over all workers, weighted by their samples."""
    known = [
        (report.train_loss, 1 if report.worker["samples"] is None else report.worker["samples"])
        for report in reports
        if report.train_loss is not None
    ]
    samples = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / samples if samples else None


def measurement_overhead(
    reports: list[RankReport], nodes: list[dict[str, Any]]
) -> dict[str, float]:
    """The fraction of a step spent on measuring: in the loop, and by the sampler."""
    in_loop = max((report.measuring_fraction for report in reports), default=0.0)
    busiest = max(node["sampler_cpu_percent"] or 0.0 for node in nodes)
    sampler = busiest / 100 / cores_usable()
    return {"fraction": in_loop + sampler, "in_loop": in_loop, "sampler": sampler}
