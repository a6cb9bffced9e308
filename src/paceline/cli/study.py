"""`paceline study`: run, list and show studies."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from paceline.study.cells import Plan
    from paceline.study.folder import Study, StudyFolder
    from paceline.study.runner import Outcome

SUMMARY = "run a grid of runs from a YAML file, and report"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_summary = "run the cells that have no result yet, then write the report"
    runs = actions.add_parser("run", help=run_summary, description=run_summary)
    _add_study(runs)
    runs.add_argument(
        "--out", metavar="DIR", help="folder of the study (default: studies/NAME, or NAME-quick)"
    )
    runs.add_argument(
        "--only", metavar="PATTERN", help="run only cells whose names match, as in *ddp*"
    )
    runs.add_argument("--repeats", metavar="N", help="override the number of repeats")
    runs.add_argument(
        "--dry-run", action="store_true", help="show the cells and their estimated time"
    )
    actions.add_parser("list", help="list the studies that come with paceline")
    show_summary = "print a study's file and its cells"
    _add_study(actions.add_parser("show", help=show_summary, description=show_summary))


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "study", metavar="FILE|NAME", help="a .yaml file, or a name from `paceline study list`"
    )
    parser.add_argument(
        "--scale", choices=("quick", "real", "full"), help="default: quick, if the study has it"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "list":
        return list_studies()
    if arguments.action == "show":
        return show_study(arguments.study, arguments.scale)
    return run_study(
        arguments.study,
        scale=arguments.scale,
        out=arguments.out,
        only=arguments.only,
        repeats=_repeats(arguments.repeats),
        is_dry=arguments.dry_run,
    )


def _repeats(text: str | None) -> int | None:
    from paceline.errors import UsageError, shown

    if text is None:
        return None
    if text.isdecimal() and len(text) < 10 and 1 <= int(text) <= 1000:
        return int(text)
    raise UsageError(f"--repeats: must be 1 to 1000, got {shown(text)}")


def run_study(
    study: str,
    *,
    scale: str | None = None,
    out: str | None = None,
    only: str | None = None,
    repeats: int | None = None,
    is_dry: bool = False,
) -> int:
    """Run the missing cells of a study and write the report; returns the exit code."""
    from paceline.launch.fork_server import ForkServer
    from paceline.study import catalogue, progress
    from paceline.study.cells import load
    from paceline.study.folder import StudyFolder
    from paceline.terminal import open_console

    # Validate before importing torch, which takes two seconds.
    plan = load(catalogue.find(study), scale, repeats)
    # Imports torch for the cells while this process imports it for the checks below.
    server = None if is_dry else ForkServer.spawn()
    with server or nullcontext() as fork_server:
        from paceline.study.cells import check_parts
        from paceline.study.runner import Runner

        check_parts(plan)
        suffix = "" if plan.study.scale == "full" else f"-{plan.study.scale}"
        folder = StudyFolder(Path(out or f"studies/{plan.study.name}{suffix}"))
        console = open_console()
        if is_dry:
            _print_dry_run(console, plan, folder, only)
            return 0
        with folder.locked():
            outcome = Runner(plan, folder, progress.choose(console), fork_server).run(only)
            _print_cells(console, folder, outcome.study)
            _print_failures(console, outcome)
            if not outcome.is_stopped:
                _report(folder, console)
    if outcome.is_stopped:
        command = ["paceline", "study", "run", study, "--out", str(folder.path)]
        for flag, value in (("--scale", scale), ("--only", only), ("--repeats", repeats)):
            command += [] if value is None else [flag, str(value)]
        sys.stderr.write(f"paceline: stopped; resume with `{shlex.join(command)}`\n")
    return outcome.exit_code


def list_studies() -> int:
    from paceline.study import catalogue
    from paceline.study.cells import load
    from paceline.terminal import open_console

    table = _table("name", "title", "runs, quick", "runs, full", right=("runs, ",))
    for name in catalogue.names():
        counts = []
        for scale in ("quick", "full"):
            plan = load(catalogue.find(name), scale)
            counts.append(str(len(plan.in_running_order())))
        table.add_row(name, plan.study.title, *counts)
    open_console().print(table)
    return 0


def show_study(study: str, scale: str | None) -> int:
    from paceline.study import catalogue
    from paceline.study.cells import load
    from paceline.terminal import open_console

    path = catalogue.find(study)
    plan = load(path, scale)
    sys.stdout.write(path.read_text(encoding="utf-8"))
    cells = plan.in_running_order()
    runs = f"{len(cells)} run{'s' * (len(cells) != 1)}"
    sys.stdout.write(f"\n# {runs} at scale {plan.study.scale}, in this order:\n")
    console = open_console()
    _print_by_cell(console, ("cell", "label"), [(cell.id, cell.label) for cell in cells])
    return 0


def _report(folder: StudyFolder, console: Console) -> None:
    from paceline.report.build import write_report
    from paceline.report.terminal import print_step_costs
    from paceline.terminal import paragraph

    report = write_report(folder.path)
    print_step_costs(console, report.collection.chapters)
    console.print()
    for headline in report.headlines:
        console.print(paragraph(headline, console))
    console.print(f"\nreport      {report.page}", soft_wrap=True)


def _print_dry_run(console: Console, plan: Plan, folder: StudyFolder, only: str | None) -> None:
    from paceline.formatting import format_duration
    from paceline.study import duration, runner
    from paceline.study.duration import DurationModel
    from paceline.study.runner import State, chosen_cells, merge_previous, state_of

    known = merge_previous(plan, folder).cells
    state_names = {
        State.DONE: "done",
        State.NEW: "to run",
        State.RESUME: "to resume",
        State.RERUN: "to rerun",
    }
    rows = []
    to_run: list[float | None] = []
    # Finished cells give better estimates than a timed step.
    forecast = DurationModel() if not any(cell.elapsed_seconds for cell in known) else None
    if forecast and console.is_terminal:
        console.print("timing a step of each model ...", style="dim")
    for cell in chosen_cells(plan, only):
        config = plan.configs[cell.id]
        state = state_of(folder, cell, config)
        reason = runner.missing_requirement(config) if state is not State.DONE else None
        text, clock = f"skipped: {reason}" if reason else state_names[state], ""
        if state is not State.DONE and reason is None:
            seconds = forecast.seconds_of(config) if forecast else duration.seconds_of(cell, known)
            to_run.append(seconds)
            clock = format_duration(seconds)
        rows.append((cell.id, cell.label, text, clock))
    _print_by_cell(console, ("cell", "label", "state", "estimate"), rows)
    total = "unknown until a cell has finished"
    estimates = [seconds for seconds in to_run if seconds is not None]
    if len(estimates) == len(to_run):
        total = format_duration(sum(estimates))
        if forecast and to_run:
            total = f"at least {total} of computation, plus communication and start-up"
    cells = f"{len(to_run)} cell{'s' * (len(to_run) != 1)}"
    # Paths are not wrapped, so that they can be copied.
    console.print(f"\n{cells} to run in {folder.path}", soft_wrap=True)
    console.print(f"estimated time: {total}")


def _print_cells(console: Console, folder: StudyFolder, study: Study) -> None:
    from paceline import formatting
    from paceline.analysis.run import open_run
    from paceline.analysis.statistics import half_interval
    from paceline.study.folder import rows

    def text(values: Sequence[float], format: Callable[[float], str]) -> str:
        half = half_interval(values)
        if half is None:
            return formatting.spread(values, format)
        return formatting.interval(sum(values) / len(values), half, format)

    found = list(rows(folder, study, lambda path: open_run(path).iteration_seconds))
    has_accuracy = any(row.accuracies for row in found) or not any(row.losses for row in found)
    figures = ("accuracy" if has_accuracy else "test loss", "time per iteration")
    table = _table("cell", "status", *figures, right=figures)
    part = ""
    has_repeats = False
    for row in found:
        has_repeats = has_repeats or len(row.iteration_seconds) > 1
        if row.part != part and len(study.parts) > 1:
            table.add_row(f"{row.part}:")
        part = row.part
        table.add_row(
            row.label,
            row.status,
            text(row.accuracies if has_accuracy else row.losses, formatting.number),
            text(row.iteration_seconds, formatting.seconds),
        )
    console.print()
    console.print(table)
    if has_repeats:
        console.print("mean ± 95% confidence interval over the runs of each configuration")


def _print_failures(console: Console, outcome: Outcome) -> None:
    for heading, cells in (("skipped", outcome.skipped), ("failed", outcome.failed)):
        if cells:
            rows = [(cell.id, cell.trouble.cause if cell.trouble else "") for cell in cells]
            console.print()
            _print_by_cell(console, (f"{heading} cell", "why"), rows)


def _print_by_cell(
    console: Console, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> None:
    """Print rows that begin with a cell id; ids are not wrapped, long ones have their own line."""
    if max((len(row[0]) for row in rows), default=0) <= console.width // 2:
        table = _table(*headings, right=("estimate",))
        table.columns[0].no_wrap = True
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    from rich.padding import Padding

    console.print(f"{headings[0]}: {', '.join(headings[1:])}")
    for cell_id, *texts in rows:
        console.print(cell_id, soft_wrap=True)
        console.print(Padding("; ".join(filter(None, texts)), (0, 0, 0, 4), expand=False))


def _table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        is_number = heading.startswith(right) if right else False
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    return table
