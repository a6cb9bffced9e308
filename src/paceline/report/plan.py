"""A plan in the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from paceline import formatting
from paceline.plan.advice import Advice
from paceline.plan.cluster_simulation import Day
from paceline.plan.plan import Plan
from paceline.plan.prediction import Prediction
from paceline.plan.sensitivity import Sensitivity
from paceline.report.wording.plan import (
    batch_advice_texts,
    batch_text,
    by_place,
    condition_notes,
    configuration,
    disturbance_notes,
    effect_cells,
    extrapolation_notes,
    limit_text,
    place_text,
    recommendation_text,
    runner_up_texts,
    step_text,
    validation_texts,
)
from paceline.terminal import open_console, paragraph

WIDTH = 80
MOST_NOTES = 6


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a table for each link, then what limits a step, and what is extrapolated or missing."""
    console = console or open_console(width=WIDTH)
    disturbances = [*disturbance_notes(plan)]
    if plan.advice is not None:
        _print_advice(console, plan.advice, disturbances)
    places = by_place(plan.predictions)
    for place, same in places.items():
        title = f"\n{plan.calibration.model}, {batch_text(same[0].target)}, {place}"
        console.print(title, style="bold")
        console.print(_table(same))
    if plan.days:
        console.print("\nA day with failures, mean of simulated days", style="bold")
        console.print(_days_table(plan.days))
    if plan.sensitivity is not None:
        target = plan.sensitivity.target
        where = f", {place_text(target)}" if len(places) > 1 else ""
        console.print(f"\nWhat limits {configuration(target)}{where}", style="bold")
        console.print(_sensitivity_table(plan.sensitivity))
    _print_notes(console, plan, [] if plan.advice is not None else disturbances)


def _table(predictions: Sequence[Prediction]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("workers", justify="right")
    table.add_column("strategy", overflow="fold", min_width=16)
    for heading in ("step, 80% interval", "samples/s", "efficiency", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = None
    for each in predictions:
        target = each.target
        table.add_row(
            f"{target.workers:,}" if target.workers != shown else "",
            target.strategy,
            step_text(each.step_seconds) + ("*" if each.extrapolated else " "),
            formatting.count(each.throughput.median),
            formatting.percent(100 * each.efficiency.median),
            formatting.percent(100 * each.exposed_communication.median),
        )
        shown = target.workers
    return table


def _days_table(days: Mapping[int, Day]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("workers", "failures", "goodput", "checkpoints", "lost", "restarts"):
        table.add_column(heading, justify="right", no_wrap=True)
    for workers, day in days.items():
        shares = (day.goodput, day.checkpoints, day.lost, day.restarts)
        table.add_row(f"{workers:,}", f"{day.failures:.1f}", *map(formatting.share, shares))
    return table


def _sensitivity_table(sensitivity: Sensitivity) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("what if", overflow="fold")
    for heading in ("step time", "samples/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for effect in sensitivity.effects:
        table.add_row(*effect_cells(effect))
    return table


def _print_advice(console: Console, advice: Advice, disturbances: Sequence[str]) -> None:
    console.print("\nRecommendation", style="bold")
    for text in (
        recommendation_text(advice),
        limit_text(advice),
        *disturbances,
        *runner_up_texts(advice),
        *batch_advice_texts(advice),
    ):
        console.print(paragraph(text, console))
    console.print(advice.command, soft_wrap=True)


def _print_notes(console: Console, plan: Plan, disturbances: Sequence[str]) -> None:
    lines = [*extrapolation_notes(plan.predictions), *condition_notes(plan)]
    console.print()
    for text in (*validation_texts(plan.checks), *disturbances):
        console.print(paragraph(text, console))
    for line in lines[:MOST_NOTES]:
        console.print(paragraph(line, console))
    if len(lines) > MOST_NOTES:
        console.print(f"and {len(lines) - MOST_NOTES} more: --json FILE has all")
