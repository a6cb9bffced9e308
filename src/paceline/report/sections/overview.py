"""Results of every configuration, its settings and the machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline import formatting
from paceline.analysis.run import Run
from paceline.analysis.run_group import NOT_RUN, RunGroup, differing, known_text
from paceline.config import RunConfig, RunSettings, non_default_values, to_argv
from paceline.records import cuda_graph_text, numerics_text
from paceline.report.document import Block, BulletList, Code, Details, Table, Text
from paceline.report.sections.common import (
    Column,
    SectionContext,
    interval_note,
    note,
    section,
    table,
)
from paceline.report.sections.timing import first_iteration_note
from paceline.report.summary import describe_restart, shows_numerics
from paceline.report.wording.runs import run_cause, world_sizes_text

MAX_REPEATS = 500
"""Rows in the table of repeats."""
MAX_ITEMS = 50
MAX_COMMANDS = 3
"""More are collapsed."""
RESIZED = (
    "Timings, phases and samples of iterations and workers cover the last world size only; traffic"
    " and overlapped communication per iteration are omitted; curves and wall time cover the whole"
    " run."
)
NOT_REPEATED = ("out", "name", "node_rank")
"""Settings that a repeated run chooses itself: where records go, and the node rank."""
LOOPBACK = RunConfig().master_addr
"""The address in the settings if torchrun or srun sets the real one."""


@section("overview", "Overview")
def overview(context: SectionContext) -> Iterator[Block]:
    yield table(
        context.groups,
        Column("configuration", lambda group: group.label),
        Column("status", _status),
        Column("runs", lambda group: len(group.runs), formatting.count),
        Column(
            "iterations",
            lambda group: group.values(lambda run: run.iterations, group.shown),
            formatting.count,
        ),
        Column(
            "wall time",
            lambda group: group.values(lambda run: run.wall_seconds, group.shown),
            formatting.seconds,
        ),
        Column(
            "time per iteration",
            lambda group: group.values(lambda run: run.iteration_seconds, group.shown),
            formatting.seconds,
            has_interval=True,
        ),
        *([_throughput_column()] if context.is_one_run else []),
        *([_final_column("test accuracy", "test_accuracy")] if context.has_accuracy else []),
        _final_column("test loss", "test_loss"),
        *(_final_column(name.replace("_", " "), name) for name in context.metrics),
        _final_column("training loss", "train_loss"),
        text_columns=2,
    )
    yield from first_iteration_note(context.groups)
    yield from interval_note(context.groups)
    yield from _repeats(context)
    runs = [run for group in context.groups for run in group.runs]
    failures = [
        (f"{run.id}: {run.status}.", run_cause(run))
        for run in runs
        # Of one run, the verdict says it.
        if not run.is_finished and not context.is_one_run
    ]
    failures += [
        (f"{group.label}.", group.trouble)
        for group in context.groups
        if group.trouble not in ("", NOT_RUN)
    ]
    restarts = [
        (f"{run.id}: restarted.", describe_restart(restart))
        for run in runs
        for restart in (run.result or {}).get("restarts") or ()
    ]
    resized = [
        (f"{run.id}: the number of workers changed.", f"{world_sizes_text(run.worlds)}. {RESIZED}")
        for run in runs
        if run.is_resized
    ]
    for items in (failures, restarts, resized):
        if items:
            yield BulletList(items[:MAX_ITEMS])
    warnings = {
        run.id: "; ".join(dict.fromkeys(map(str, texts)))
        for run in runs
        if (texts := (run.result or {}).get("warnings"))
    }
    if warnings:
        shown = list(warnings.items())[:20]
        yield BulletList(
            [
                ("Warning." if context.is_one_run else f"Warning of {name}.", text)
                for name, text in shown
            ]
        )


def _status(group: RunGroup) -> str:
    return group.status if group.runs else group.trouble.partition(":")[0] or "not run"


def _throughput_column() -> Column[RunGroup]:
    """Of one run: the table of several has no room for it."""
    return Column(
        "samples/s",
        lambda group: group.values(lambda run: run.samples_per_second, group.shown),
        formatting.count,
    )


def _final_column(heading: str, key: str) -> Column[RunGroup]:
    return Column(
        heading,
        lambda group: group.values(lambda run: run.final(key), group.shown),
        formatting.number,
        has_interval=key == "test_accuracy",
    )


class _Repeat(NamedTuple):
    label: str
    number: int
    run: Run


def _repeats(context: SectionContext) -> Iterator[Block]:
    """A row per run, where groups have several."""
    repeated = [group for group in context.groups if len(group.runs) > 1]
    if not repeated:
        return
    repeats = [
        _Repeat(group.label, number, run)
        for group in repeated
        for number, run in enumerate(group.runs, 1)
    ]
    target: list[Column[_Repeat]] = []
    if any(group.settings.target is not None for group in repeated):
        target.append(
            Column("time to target", lambda row: row.run.seconds_to_target, formatting.seconds)
        )
    blocks: list[Block] = [
        table(
            repeats[:MAX_REPEATS],
            Column("configuration", lambda row: row.label),
            Column("repeat", lambda row: row.number),
            Column("status", lambda row: row.run.status),
            Column("seed", lambda row: row.run.settings.get("seed")),
            Column("iterations", lambda row: row.run.iterations, formatting.count),
            Column("wall time", lambda row: row.run.wall_seconds, formatting.seconds),
            Column("time per iteration", lambda row: row.run.iteration_seconds, formatting.seconds),
            *([_repeat_column("test_accuracy")] if context.has_accuracy else []),
            _repeat_column("test_loss"),
            *map(_repeat_column, context.metrics),
            Column("training loss", lambda row: row.run.final("train_loss"), formatting.number),
            *target,
            Column("run", lambda row: row.run.id),
            text_columns=3,
        )
    ]
    if len(repeats) > MAX_REPEATS:
        blocks.append(note(f"The first {MAX_REPEATS} of {len(repeats):,} runs."))
    yield Details("Each repeat", blocks)


def _repeat_column(key: str) -> Column[_Repeat]:
    return Column(key.replace("_", " "), lambda row: row.run.final(key), formatting.number)


@section("configuration", "Configuration and machine")
def configuration(context: SectionContext) -> Iterator[Block]:
    groups = [group for group in context.groups if group.runs]
    if not groups:
        return
    names = differing([group.settings for group in groups])
    if names:
        yield Text("Settings that differ:")
        yield table(
            groups,
            Column("configuration", lambda group: group.label),
            *map(_setting_column, names),
            text_columns=1 + len(names),
        )
    yield from _numerics(groups)
    runs = [run for group in groups for run in group.runs]
    yield from _machines(runs)
    commands: list[Block] = []
    for group in groups:
        seeds = sorted({run.settings.config.seed for run in group.runs if run.settings.config})
        repeats = f" (seeds {', '.join(map(str, seeds))})" if len(seeds) > 1 else ""
        config = group.settings.config
        where = "" if config is None else where_to_type(config)
        if text := command(group.settings):
            label = "To rerun it" if context.is_one_run else group.label
            commands += [Text(f"{label}{repeats}{where}:"), Code(text)]
    if commands and not context.is_one_run:
        yield Text("To rerun a configuration:")
    if len(commands) <= 2 * MAX_COMMANDS:
        yield from commands
    else:
        yield Details(f"{len(commands) // 2:,} commands", commands)
    overheads = [run.result["measurement_overhead"].get("fraction") for run in runs if run.result]
    shares = [value for value in overheads if isinstance(value, float)]
    if shares:
        yield note(
            f"Measurement overhead: at most {formatting.share(max(shares))} of a run's time."
        )


def _numerics(groups: Sequence[RunGroup]) -> Iterator[Block]:
    """Precision and memory format of each configuration, and whether its steps were captured."""
    formats, graphs = [], []
    for group in groups:
        shown = (run.numerics for run in group.runs if shows_numerics(run.numerics))
        if texts := dict.fromkeys(map(numerics_text, shown)):
            formats.append((group.label, "; ".join(texts)))
        captured = (run.cuda_graph for run in group.runs if run.cuda_graph)
        if texts := dict.fromkeys(map(cuda_graph_text, captured)):
            graphs.append((group.label, "; ".join(texts)))
    if formats:
        yield Table(("configuration", "precision and memory format"), formats, 2)
    if graphs:
        yield Table(("configuration", "CUDA graphs"), graphs, 2)


def _setting_column(name: str) -> Column[RunGroup]:
    return Column(name.replace("_", "-"), lambda group: known_text(group.settings, name))


def command(settings: RunSettings) -> str:
    """The command that repeats a run; empty if it is not known, as for a user's own loop."""
    if settings.kind == "profile" and settings.get("command"):
        flags = ["--steps", str(settings.get("steps"))] if settings.get("steps") else []
        flags += ["--trace"] if settings.get("trace") else []
        given = map(str, settings.get("command"))
        return shlex.join(["paceline", "profile", *flags, "--", *given])
    if settings.config is None:
        return ""
    values = non_default_values(settings.config)
    kept = {name: value for name, value in values.items() if name not in NOT_REPEATED}
    return shlex.join(["paceline", "train", *to_argv(kept)])


def where_to_type(config: RunConfig) -> str:
    """Where to type a command that several machines need; empty if one machine starts it all."""
    if config.nnodes == 1 or config.cluster or config.hosts or config.launcher == "ray":
        return ""
    flags = [] if config.elastic else ["its --node-rank"]
    if config.master_addr == LOOPBACK:
        flags.append("--master-addr of the first")
    options = f", with {' and '.join(flags)}" if flags else ""
    return f" (on each of the {config.nnodes} machines{options})"


def _machines(runs: Sequence[Run]) -> Iterator[Block]:
    """Each distinct machine with its runs, and emulated clusters as measured."""
    found: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        facts = tuple(machine(run))
        if facts:
            found.setdefault(facts, []).append(run)
    for facts, own in found.items():
        title = "" if len(runs) == 1 else ": all runs" if len(found) == 1 else f": {_run_list(own)}"
        yield Table((f"Machine{title}", ""), facts, 2)
    clusters = {tuple(rows): run for run in runs if (rows := cluster_rows(run))}
    for measured, run in list(clusters.items())[:3]:
        yield Text(f"The emulated cluster, as measured before {run.id}:")
        yield Table(("what", "requested", "measured"), measured)


def _run_list(runs: Sequence[Run]) -> str:
    more = f" and {len(runs) - 6} more" if len(runs) > 6 else ""
    return ", ".join(run.id for run in runs[:6]) + more


def machine(run: Run) -> list[tuple[str, str]]:
    """Hardware and software of a run; empty without a result."""
    if run.result is None:
        return []
    hardware, software = run.result["hardware"], run.result["software"]
    quota = hardware.get("cpu_quota")
    cores = f"{hardware.get('cores', '?')} of {hardware.get('cores_in_machine', '?')} cores"
    gpus = hardware.get("gpus") or []
    names = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus]
    memory = hardware.get("memory_bytes")
    return [
        ("CPU", f"{hardware.get('cpu', '?')}, {cores}" + (f", quota {quota:g}" if quota else "")),
        ("Memory", formatting.size(memory) if isinstance(memory, int | float) else "?"),
        ("GPUs", ", ".join(names) or "none"),
        ("System", f"{hardware.get('kernel', '?')}, {hardware.get('architecture', '?')}"),
        ("Software", ", ".join(f"{name} {text}" for name, text in software.items() if text)),
    ]


def cluster_rows(run: Run) -> list[tuple[str, str, str]]:
    """What was requested of an emulated cluster, and what was measured."""
    cluster = (run.result or {}).get("cluster")
    found = cluster.get("got") if isinstance(cluster, dict) else None
    rows = []
    for item in found or ():
        if isinstance(item, dict):
            node = "" if item.get("node") is None else f", node {item['node']}"
            unit = str(item.get("unit", ""))
            requested = item.get("asked")
            rows.append(
                (
                    f"{item.get('what', '?')}{node}",
                    "-" if requested is None else f"{requested:.4g} {unit}",
                    f"{item.get('got', float('nan')):.4g} {unit}",
                )
            )
    return rows
