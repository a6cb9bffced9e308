"""The summary of one run in the terminal.

Every run ends with it, so it imports nothing of pages and comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeGuard

from rich.table import Table

from paceline import formatting
from paceline.analysis.contention import MIN_CONTENTION_SHARE, other_processes_share
from paceline.analysis.phases import STARTUP, worker_breakdown
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.script.findings import find_in_script, group_core_wait
from paceline.measure.startup import NEGLIGIBLE_SECONDS
from paceline.records import (
    PHASES,
    Result,
    RunFolder,
    cuda_graph_text,
    noise_scale_text,
    numerics_text,
    settings_of,
)
from paceline.report.wording.post_mortem import headline, is_pause
from paceline.report.wording.scripts import account, contention
from paceline.terminal import open_console

BAR_WIDTH = 24
WORKERS_SHOWN = 4
"""As many as fit 80 columns."""
UNRECORDED_SECONDS = 1.0
"""Ranks record their steps every half a second."""


def print_summary(
    folder: RunFolder, result: Result, file: TextIO | None = None, page: Path | None = None
) -> None:
    """Print to `file`, by default to standard output; `page` is the report of the run."""
    console = open_console(file=file)
    console.print()
    if result["workers"]:
        console.print(phase_table(result))
        console.print()
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    rows = [("status", _status(result))]
    if result["workers"]:
        run = Run(folder, settings_of(result, folder.result_file), result)
        rows = summary_rows(result, run)
        rows[1:1] = _script_rows(run)
        rows[:0] = [("pause", headline(one)) for one in run.post_mortems if is_pause(one)]
        rows += _contention(run)
    rows += _restarts_and_warnings(result)
    for name, text in rows:
        facts.add_row(name, text)
    console.print(facts)
    # A path that is wrapped cannot be copied.
    width = max(len("records"), *(len(name) for name, _ in rows)) + 2
    for name, path in (("records", folder.path), ("report", page)):
        if path is not None:
            line = f"{name:<{width}}{path}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def _status(result: Result) -> str:
    """With the cause for a profiled script; that of a training run is the error message."""
    status, cause = str(result["status"]), result.get("cause")
    if cause is None or result.get("kind") != "profile":
        return status
    return cause if cause.startswith(status) else f"{status}: {cause}"


def phase_table(result: Result) -> Table:
    """Time by phase; phases without any are omitted.

    Of the first worker in seconds, with a bar; of a few more beside it, as shares.
    """
    first, *others = result["workers"][:WORKERS_SHOWN]
    splits = [worker_breakdown(worker) for worker in (first, *others)]
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    names = [f"rank {worker['rank']}" for worker in (first, *others)]
    for heading in (f"{names[0]} (s)", *names):
        table.add_column(heading, justify="right")
    table.add_column()
    for phase in (*PHASES[:-1], STARTUP, PHASES[-1]):
        spent = splits[0].seconds[phase]
        shares = [split.share(phase) for split in splits]
        if any(share >= 0.0005 for share in shares):
            bar = "█" * round(BAR_WIDTH * shares[0])
            table.add_row(phase, f"{spent:.2f}", *map(formatting.share, shares), bar)
    total = splits[0].total
    whole = formatting.share(total / first["wall_seconds"])
    table.add_row("all", f"{total:.2f}", whole, *([""] * len(others)))
    return table


def views_text(result: Result) -> str:
    """State test-time augmentation, if the run used it."""
    views = result["config"].get("eval_views", 1)
    return f" (mean over {views} views)" if views > 1 else ""


def _accuracy(result: Result) -> str:
    accuracy = result["final"].get("test_accuracy")
    if accuracy is None:
        return ""
    return f"accuracy {formatting.number(accuracy)}{views_text(result)}, "


def _training_loss(final: Mapping[str, Any]) -> str:
    """The last loss in the progress line is another: that of a single block of steps."""
    loss = final.get("train_loss")
    text = f"loss {formatting.number(loss)}"
    return text if loss is None else f"{text} (mean of the last steps, up to 100)"


def _more_metrics(result: Result) -> str:
    return "".join(
        f", {name.replace('_', ' ')} {formatting.number(value)}"
        for name, value in result.get("metrics", {}).items()
        if name != "accuracy"
    )


def _bytes_in_all(checkpoints: Mapping[str, Any]) -> str:
    """Nothing for a profiled script, of whose files only the time is known."""
    size = checkpoints["bytes"]
    return "" if size is None else f", {formatting.size(size)} in all"


def summary_rows(result: Result, run: Run) -> list[tuple[str, str]]:
    final, checkpoints = result["final"], result["checkpoints"]
    rows = [("status", _status(result))]
    if final.get("test_loss") is not None:
        rows.append(
            (
                "test set",
                f"{_accuracy(result)}loss {formatting.number(final['test_loss'])}"
                f"{_more_metrics(result)};"
                f" training {_training_loss(final)}",
            )
        )
    elif final.get("train_loss") is not None:
        rows.append(("training", _training_loss(final)))
    if result["seconds_to_target"] is not None:
        config = result["config"]
        accuracy, loss = config["target_accuracy"], config.get("target_loss")
        target = f"accuracy {accuracy}" if accuracy is not None else f"loss {loss}"
        spent = formatting.seconds(result["seconds_to_target"])
        rows.append(("target", f"{target} after {spent}, excluding evaluation"))
    rows.append(("iterations", f"{result['iterations']:,}; {_iteration_times(result, run)}"))
    if run.samples_per_second is not None:
        rows.append(("throughput", f"{formatting.count(run.samples_per_second)} samples/s"))
    if (whole := result.get("command_seconds")) is not None:
        wall = formatting.seconds(result["wall_seconds"])
        rows.append(
            ("wall time", f"{wall} after imports; the command took {formatting.seconds(whole)}")
        )
    if shows_numerics(numerics := result["workers"][0].get("numerics")):
        rows.append(("precision", numerics_text(numerics)))
    if cuda_graph := result["workers"][0].get("cuda_graph"):
        rows.append(("CUDA graph", cuda_graph_text(cuda_graph)))
    if shows_noise(result):
        rows.append(("noise scale", noise_scale_text(result["workers"][0]["noise_scale"])))
    if text := startup_text(result["workers"][0].get("startup_seconds") or {}):
        rows.append(("start-up", text))
    if text := unrecorded_text(result["workers"]):
        rows.append(("unrecorded", text))
    if len(result["workers"]) > 1:
        rows.append(("traffic", _traffic(result)))
    if text := sampled_text(result["workers"]):
        rows.append(("sampling", text))
    if result["nodes"]:
        rows.append(("resources", _resources(result["nodes"], result["hardware"])))
    overhead = result["measurement_overhead"].get("fraction")
    if overhead is not None:
        rows.append(("measuring", f"{formatting.share(overhead)} of the time"))
    if checkpoints.get("count"):
        blocked = formatting.seconds(checkpoints["blocked_seconds"])
        rows.append(
            (
                "checkpoints",
                f"{checkpoints['count']}{_bytes_in_all(checkpoints)};"
                f" training blocked for {blocked}",
            )
        )
    return rows


def shows_noise(result: Result) -> bool:
    """Whether the gradient noise scale was measured, or asked for."""
    noise = result["workers"][0].get("noise_scale")
    if noise is None:
        return False
    return noise.get("batch") is not None or isinstance(result["config"].get("noise_every"), int)


def shows_numerics(numerics: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Whether precision and memory format were measured, or are not fp32 and contiguous."""
    if numerics is None:
        return False
    is_plain = numerics["precision"] == "fp32" and not numerics["channels_last"]
    return not is_plain or bool(numerics.get("step_seconds"))


def startup_text(startup: Mapping[str, float]) -> str:
    """The phases of a worker's start-up, if notable; imports are not in its wall time."""
    parts = [
        f"{part} {formatting.seconds(spent)}"
        for part, spent in startup.items()
        if spent >= NEGLIGIBLE_SECONDS
    ]
    return f"rank 0 before its first iteration: {', '.join(parts)}" if parts else ""


def unrecorded_text(workers: Sequence[Mapping[str, Any]]) -> str:
    """What ranks that were killed did not record themselves; empty if that is not notable."""
    lost = {
        int(worker["rank"]): seconds
        for worker in workers
        if (seconds := worker.get("unrecorded_seconds") or 0.0)
    }
    if max(lost.values(), default=0.0) < UNRECORDED_SECONDS:
        return ""
    texts = [f"{formatting.seconds(seconds)} of rank {rank}" for rank, seconds in lost.items()]
    more = f" and {len(lost) - WORKERS_SHOWN} more ranks" if len(lost) > WORKERS_SHOWN else ""
    counts_as = "`wait` in a collective that others never called, else `other`"
    if len(workers) == 1:
        counts_as = "`other`"
    return f"the last {', '.join(texts[:WORKERS_SHOWN])}{more}: {counts_as}"


def sampled_text(workers: Sequence[Mapping[str, Any]]) -> str:
    """How many steps were recorded in full; empty if all of them were."""
    counts = [one for worker in workers if (one := worker.get("steps_recorded"))]
    if not counts:
        return ""
    fewest = min(counts, key=lambda one: one["steps"] / max(1, one["of"]))
    return (
        f"{fewest['steps']:,} of {fewest['of']:,} steps were recorded in full, because that"
        " slows down such short steps; of the others, the step, its input and its backward passes"
        " were timed, and the rest is estimated from the recorded steps before them"
    )


def _iteration_times(result: Result, run: Run) -> str:
    """Each statistic is the mean over workers, as in a report."""
    timings = [worker["iteration_seconds"] for worker in result["workers"]]

    def mean(key: str) -> str:
        known = [timing[key] for timing in timings if timing.get(key) is not None]
        return formatting.seconds(sum(known) / len(known) if known else None)

    whose = f", averaged over {len(timings)} workers" if len(timings) > 1 else ""
    if not run.is_synchronous:
        return (
            f"step time {formatting.seconds(run.iteration_seconds)} (mean, all workers together);"
            f" per worker {mean('median')} (median), {mean('p95')} (p95),"
            f" the first {mean('first')}{whose}"
        )
    return (
        f"step time {mean('median')} (median), {mean('mean')} (mean), {mean('p95')} (p95),"
        f" the first {mean('first')}{whose}"
    )


def _resources(nodes: Sequence[Mapping[str, Any]], hardware: Mapping[str, Any]) -> str:
    node = nodes[0]
    whose = f"; the first of {len(nodes)} machines" if len(nodes) > 1 else ""
    return (
        f"CPU {_cores(node.get('cpu_percent_mean'), hardware.get('cores'))} mean, memory"
        f" {formatting.size(node.get('rss_bytes_mean'))} mean,"
        f" {formatting.size(node.get('rss_bytes_peak'))} peak{whose}"
    )


def _cores(cpu_percent: float | None, cores: int | None) -> str:
    """A sampled percentage is of one core: two busy cores are 200%."""
    if cpu_percent is None:
        return "-"
    used = f"{cpu_percent / 100:.2f}"
    return f"{used} of {cores} core{'' if cores == 1 else 's'}" if cores else f"{used} cores"


def _script_rows(run: Run) -> list[tuple[str, str]]:
    """What slows down a profiled script, with what to change."""
    return [("finding", account(one)) for one in find_in_script(run)]


def _contention(run: Run) -> list[tuple[str, str]]:
    share = other_processes_share(run)
    if share is None or share < MIN_CONTENTION_SHARE:
        return []
    text = f"other processes used {share:.0%} of the CPU; timings are not representative"
    if run.settings.kind == "profile":
        text += f". {contention([group_core_wait(RunGroup('', [run]))])}"
    return [("warning", text)]


def _restarts_and_warnings(result: Result) -> list[tuple[str, str]]:
    """Restarts and warnings."""
    restarts, warnings = result.get("restarts") or [], result.get("warnings") or []
    causes = "; ".join(map(describe_restart, restarts))
    rows = [("restarts", f"{len(restarts)}: {causes}")] if restarts else []
    return rows + [("warning", str(text)) for text in warnings]


def describe_restart(restart: Mapping[str, Any]) -> str:
    """The cause and the first iteration of an entry of a result's `restarts`."""
    begin = f"iteration {restart['iteration']}" if restart["iteration"] else "the beginning"
    return f"{restart['cause']} (restarted from {begin})"


def _traffic(result: Result) -> str:
    """Bytes that the first worker sent by kind, and overlapped communication."""
    worker = result["workers"][0]
    sent = ", ".join(
        f"{kind} {formatting.size(count['bytes_sent'])}"
        for kind, count in worker["traffic"].items()
        if count["bytes_sent"]
    )
    hidden = worker.get("hidden_exchange_seconds")
    tail = f"; {formatting.seconds(hidden)} overlapped communication in all" if hidden else ""
    if hidden is None:
        tail = "; overlapped communication was not measured"
    return f"rank 0 sent {sent or 'nothing'}{tail}"
