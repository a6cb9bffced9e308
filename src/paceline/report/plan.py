"""A plan in the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from paceline import formatting
from paceline.plan.advice import Advice
from paceline.plan.cluster_simulation import Day
from paceline.plan.plan import Plan
from paceline.plan.prediction import Interval, Prediction
from paceline.terminal import open_console, paragraph

WIDTH = 80
MOST_NOTES = 6


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print a table for each link, then what is extrapolated or missing."""
    console = console or open_console(width=WIDTH)
    if plan.advice is not None:
        _print_advice(console, plan.advice)
    links = dict.fromkeys(_place(each) for each in plan.predictions)
    for place in links:
        same = [each for each in plan.predictions if _place(each) == place]
        target = same[0].target
        batch = (
            f"batch {target.samples // target.workers:,} per worker"
            if target.scaling == "weak"
            else f"batch {target.samples:,}"
        )
        console.print(f"\n{plan.calibration.model}, {batch}, {place}", style="bold")
        console.print(_table(same))
    if plan.days:
        console.print("\nA day with failures, mean of simulated days", style="bold")
        console.print(_days_table(plan.days))
    _print_notes(console, plan)


def _place(prediction: Prediction) -> str:
    link, hosts = prediction.target.link, prediction.target.hosts
    if link is None:
        return "one host" if prediction.target.host_count == 1 else f"{hosts} hosts"
    racks = prediction.target.racks
    parts = [f"{hosts} hosts"] if hosts is not None else []
    parts += [f"link {link}"]
    if racks is not None:
        parts += [f"racks of {racks.size}, oversubscribed {racks.oversubscription:g}:1"]
    return ", ".join(parts)


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
            _step(each.step_seconds) + ("*" if each.extrapolated else " "),
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


def _step(interval: Interval) -> str:
    """Such as "343 ms (320 to 370)"."""
    median, low, high = (
        formatting.short_seconds(each) for each in (interval.median, interval.low, interval.high)
    )
    unit = f" {median.rpartition(' ')[2]}"
    if all(text.endswith(unit) for text in (low, high)):
        low, high = low.removesuffix(unit), high.removesuffix(unit)
    return f"{median} ({low} to {high})"


def _print_advice(console: Console, advice: Advice) -> None:
    best, price = advice.best, advice.price_per_worker_hour
    console.print("\nRecommendation", style="bold")
    text = f"{_configuration(best)}: {_step(best.step_seconds)} per step"
    text += f", {formatting.count(best.throughput.median)} samples/s"
    if price is not None:
        cost = best.target.workers * price / 3600 / best.throughput.median
        text += f", {1e6 * cost:.3g} per million samples"
    console.print(paragraph(text + (", extrapolated" if best.extrapolated else ""), console))
    exposed = formatting.percent(100 * best.exposed_communication.median)
    console.print(f"Limited by {advice.limit}: {exposed} of a step is exposed communication.")
    what = "time" if price is None else "money"
    for other, more in advice.runners_up:
        console.print(paragraph(f"{more:.0%} more {what}: {_configuration(other)}", console))
    if advice.codec is not None:
        encoded, saving = advice.codec
        text = f"{saving:.0%} less {what}: {_configuration(encoded)}, which changes the gradients:"
        console.print(paragraph(f"{text} compare the accuracy", console))
    console.print(advice.command, soft_wrap=True)


def _configuration(prediction: Prediction) -> str:
    target = prediction.target
    options = "".join(f", {key}={value}" for key, value in target.options.items())
    workers = "1 worker" if target.workers == 1 else f"{target.workers:,} workers"
    return f"{target.strategy}{options}, {workers}, batch {target.samples:,}"


def _print_notes(console: Console, plan: Plan) -> None:
    reasons = dict.fromkeys(reason for each in plan.predictions for reason in each.extrapolated)
    lines = [*(f"* extrapolated: {reason}" for reason in reasons), *plan.skipped]
    if not plan.calibration.has_ready_times and any(
        each.target.strategy in ("overlap", "ddp") for each in plan.predictions
    ):
        lines.append(
            "When gradients are ready was not measured: assumed to be at equal distances. A run of"
            " overlap with two workers and -o bucket_mib=measured measures it."
        )
    for line in lines[:MOST_NOTES]:
        console.print(paragraph(line, console))
    if len(lines) > MOST_NOTES:
        console.print(f"and {len(lines) - MOST_NOTES} more: --json FILE has all")
