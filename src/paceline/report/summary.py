"""One run's account, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from paceline.records import Result, RunFolder
from paceline.report import units

BAR_WIDTH = 30


def print_summary(folder: RunFolder, result: Result) -> None:
    console = Console(highlight=False)
    console.print()
    console.print(phase_table(result))
    console.print()
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in summary_rows(result):
        facts.add_row(name, text)
    facts.add_row("records", str(folder.path))
    console.print(facts)


def phase_table(result: Result) -> Table:
    """Where the first worker's seconds went; phases that took none are left out."""
    worker = result["workers"][0]
    wall = worker["wall_seconds"]
    table = Table(box=None, pad_edge=False)
    table.add_column("phase")
    for heading in ("seconds", "share"):
        table.add_column(heading, justify="right")
    table.add_column()
    for phase, spent in worker["phases"].items():
        if spent > 0:
            bar = "█" * round(BAR_WIDTH * spent / wall)
            table.add_row(phase, f"{spent:.2f}", units.share(spent / wall), bar)
    total = sum(worker["phases"].values())
    table.add_row("all", f"{total:.2f}", f"of {wall:.2f} s wall time")
    return table


def summary_rows(result: Result) -> list[tuple[str, str]]:
    worker, node, final = result["workers"][0], result["nodes"][0], result["final"]
    timing, checkpoints = worker["iteration_seconds"], result["checkpoints"]
    rows = [
        ("status", result["status"]),
        (
            "test set",
            f"accuracy {units.number(final['test_accuracy'])},"
            f" loss {units.number(final['test_loss'])};"
            f" training loss {units.number(final['train_loss'])}",
        ),
        (
            "iterations",
            f"{result['iterations']:,} of {units.seconds(timing['median'])} (median);"
            f" mean {units.seconds(timing['mean'])}, p95 {units.seconds(timing['p95'])},"
            f" first {units.seconds(timing['first'])}",
        ),
        (
            "resources",
            f"CPU {units.percent(node['cpu_percent_mean'])} mean, memory"
            f" {units.size(node['rss_bytes_mean'])} mean,"
            f" {units.size(node['rss_bytes_peak'])} peak",
        ),
        ("measuring", f"{units.share(result['measurement_overhead']['fraction'])} of the time"),
    ]
    if result["seconds_to_target"] is not None:
        target = result["config"]["target_accuracy"]
        spent = units.seconds(result["seconds_to_target"])
        rows.insert(2, ("target", f"accuracy {target} after {spent}, evaluation not counted"))
    if checkpoints.get("count"):
        blocked = units.seconds(checkpoints["blocked_seconds"])
        rows.append(
            (
                "checkpoints",
                f"{checkpoints['count']}, {units.size(checkpoints['bytes'])} in all;"
                f" training waited {blocked}",
            )
        )
    return rows
