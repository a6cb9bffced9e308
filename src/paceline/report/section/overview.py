"""Every cell in a line: how it ended and what it came to."""

from __future__ import annotations

from paceline.report import units
from paceline.report.cells import NOT_RUN, Cell
from paceline.report.document import Block, Items, Table
from paceline.report.section.outline import Outline, known
from paceline.report.summary import describe_restart
from paceline.report.worlds import described

TITLE = "All cells"
SINCE = (
    "Times, phases and samples of iterations and workers are of the iterations since the last"
    " change; what an iteration sent or hid is left out; curves and wall time are of the whole run."
)


def build(outline: Outline) -> list[Block]:
    columns = ("cell", "status", "runs", "iterations", "wall time", "time per iteration",
               "test accuracy", "test loss", "training loss")  # fmt: skip
    blocks: list[Block] = [Table(columns, [_row(cell) for cell in outline.cells], words=2)]
    troubled = [
        (f"{run.id}: {run.status}.", run.cause)
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
        blocks.append(Items(troubled[:50]))
    restarts = [
        (f"{run.id}: restarted.", describe_restart(restart))
        for cell in outline.cells
        for run in cell.runs
        for restart in (run.result or {}).get("restarts") or ()
    ]
    if restarts:
        blocks.append(Items(restarts[:50]))
    resized = [
        (f"{run.id}: the number of workers changed.", f"{described(run.worlds)}. {SINCE}")
        for cell in outline.cells
        for run in cell.runs
        if run.is_resized
    ]
    if resized:
        blocks.append(Items(resized[:50]))
    warnings = {
        run.id: "; ".join(dict.fromkeys(map(str, texts)))
        for cell in outline.cells
        for run in cell.runs
        if (texts := (run.result or {}).get("warnings"))
    }
    if warnings:
        items = list(warnings.items())[:20]
        blocks.append(Items([(f"Warning of {name}.", text) for name, text in items]))
    return blocks


def _row(cell: Cell) -> tuple[str, ...]:
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
        units.count(len(cell.runs)),
        units.spread([run.iterations for run in runs], units.count) if _differs(cell)
        else units.count(runs[0].iterations if runs else None),
        units.spread(walls, units.seconds),
        units.spread(means, units.seconds),
        *(units.spread(finals[key], units.number)
          for key in ("test_accuracy", "test_loss", "train_loss")),
    )  # fmt: skip


def _differs(cell: Cell) -> bool:
    return len({run.iterations for run in cell.shown}) > 1
