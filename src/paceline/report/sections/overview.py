"""Every cell in a line: how it ended and what it came to."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.run import Run
from paceline.analysis.run_group import NOT_RUN, RunGroup
from paceline.report.document import Block, BulletList, Details, Table, Text
from paceline.report.sections.outline import SectionContext, known
from paceline.report.sections.phases import first_note
from paceline.report.summary import describe_restart
from paceline.report.wording import run_cause, world_sizes_text

TITLE = "Overview"
MOST_REPEATS = 500
"""Rows in the table of repeats."""
SINCE = (
    "Timings, phases and samples of iterations and workers cover the last world size only; traffic"
    " and overlapped communication per iteration are omitted; curves and wall time cover the whole"
    " run."
)


def build(outline: SectionContext) -> list[Block]:
    columns = ("configuration", "status", "runs", "iterations", "wall time", "time per iteration",
               "test accuracy", "test loss", "training loss")  # fmt: skip
    blocks: list[Block] = [
        Table(columns, [_row(cell) for cell in outline.cells], words=2),
        *first_note(outline.cells),
        *_repeats(outline.cells),
    ]
    troubled = [
        (f"{run.id}: {run.status}.", run_cause(run))
        for cell in outline.cells
        for run in cell.runs
        if not run.is_finished
    ]
    troubled += [
        (f"{cell.label}.", cell.trouble)
        for cell in outline.cells
        if cell.trouble not in ("", NOT_RUN)
    ]
    if troubled:
        blocks.append(BulletList(troubled[:50]))
    restarts = [
        (f"{run.id}: restarted.", describe_restart(restart))
        for cell in outline.cells
        for run in cell.runs
        for restart in (run.result or {}).get("restarts") or ()
    ]
    if restarts:
        blocks.append(BulletList(restarts[:50]))
    resized = [
        (f"{run.id}: the number of workers changed.", f"{world_sizes_text(run.worlds)}. {SINCE}")
        for cell in outline.cells
        for run in cell.runs
        if run.is_resized
    ]
    if resized:
        blocks.append(BulletList(resized[:50]))
    warnings = {
        run.id: "; ".join(dict.fromkeys(map(str, texts)))
        for cell in outline.cells
        for run in cell.runs
        if (texts := (run.result or {}).get("warnings"))
    }
    if warnings:
        items = list(warnings.items())[:20]
        blocks.append(BulletList([(f"Warning of {name}.", text) for name, text in items]))
    return blocks


def _repeats(cells: Sequence[RunGroup]) -> list[Block]:
    """Each run in a line, where cells have several."""
    several = [cell for cell in cells if len(cell.runs) > 1]
    if not several:
        return []
    columns = ["configuration", "repeat", "status", "seed", "iterations", "wall time",
               "time per iteration", "test accuracy", "test loss", "training loss",
               "run"]  # fmt: skip
    rows = [
        _repeat_row(cell.label, number, run)
        for cell in several
        for number, run in enumerate(cell.runs, 1)
    ]
    if any(cell.config.target_accuracy is not None for cell in several):
        columns.insert(-1, "time to target")
        runs = (run for cell in several for run in cell.runs)
        for row, run in zip(rows, runs, strict=True):
            row.insert(-1, formatting.seconds(run.seconds_to_target))
    blocks: list[Block] = [Table(columns, rows[:MOST_REPEATS], words=3)]
    if len(rows) > MOST_REPEATS:
        blocks.append(Text(f"The first {MOST_REPEATS} of {len(rows):,} runs.", "note"))
    return [Details("Each repeat", blocks)]


def _repeat_row(label: str, number: int, run: Run) -> list[str]:
    return [
        label,
        str(number),
        run.status,
        str(run.config.seed),
        formatting.count(run.iterations),
        formatting.seconds(run.result["wall_seconds"] if run.result else None),
        formatting.seconds(run.iteration_seconds),
        *(
            formatting.number(run.final(key))
            for key in ("test_accuracy", "test_loss", "train_loss")
        ),
        run.id,
    ]


def _row(cell: RunGroup) -> tuple[str, ...]:
    runs = cell.shown
    walls = [run.result["wall_seconds"] for run in runs if run.result]
    finals = {
        key: known(run.final(key) for run in runs)
        for key in ("test_accuracy", "test_loss", "train_loss")
    }
    means = known(run.iteration_seconds for run in runs)
    return (
        cell.label,
        cell.status if cell.runs else cell.trouble.partition(":")[0] or "not run",
        formatting.count(len(cell.runs)),
        formatting.spread([run.iterations for run in runs], formatting.count) if _differs(cell)
        else formatting.count(runs[0].iterations if runs else None),
        formatting.spread(walls, formatting.seconds),
        formatting.spread(means, formatting.seconds),
        *(formatting.spread(finals[key], formatting.number)
          for key in ("test_accuracy", "test_loss", "train_loss")),
    )  # fmt: skip


def _differs(cell: RunGroup) -> bool:
    return len({run.iterations for run in cell.shown}) > 1
