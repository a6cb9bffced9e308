"""One run as a picture: loss, accuracy, CPU and memory against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RecordsError
from paceline.measure.resources import read_resources
from paceline.records import RunFolder, read_lines

POINTS = 1000
"""More than so many points of a curve are averaged in blocks: no screen shows more."""


def draw_run(folder: RunFolder) -> list[Path]:
    """Write `run.svg` and `run.png` into the run's folder; returns their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The figure is made without pyplot, which would keep state and might look for a screen.
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    config = folder.read_config()
    figure.suptitle(
        f"{config.model} on {config.data}, {config.strategy}", x=0.01, ha="left", weight="bold"
    )
    panels = figure.subplots(2, 2, sharex=True)
    begin, seconds, losses = training_curve(folder)
    evaluations = _events(folder, "evaluation")
    times = [event["time"] - begin for event in evaluations]
    _plot(
        panels[0, 0],
        "loss",
        [(seconds, losses, "training"), (times, _column(evaluations, "test_loss"), "test")],
    )
    _plot(panels[0, 1], "test accuracy", [(times, _column(evaluations, "test_accuracy"), "")])
    samples = read_resources(folder.resources_file(0))
    clock = [sample["time"] - begin for sample in samples]
    _plot(panels[1, 0], "CPU, % of one core", [(clock, _column(samples, "cpu_percent"), "")])
    memory = [sample["rss_bytes"] / 1e6 for sample in samples]
    _plot(panels[1, 1], "memory (RSS), MB", [(clock, memory, "")])
    for panel in panels[1]:
        panel.set_xlabel("seconds since training began")
    paths = [folder.path / "run.svg", folder.path / "run.png"]
    try:
        for path in paths:
            figure.savefig(path, dpi=130)
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from None
    return paths


def training_curve(folder: RunFolder) -> tuple[float, list[float], list[float]]:
    """When training began, and the training loss against seconds since, at most POINTS of it."""
    blocks = [event for event in _events(folder, "iterations") if event["seconds"]]
    if not blocks:
        return 0.0, [], []
    begin = blocks[0]["time"] - sum(blocks[0]["seconds"])
    points: list[tuple[float, float]] = []
    for block in blocks:
        # A block is written when its last iteration ends: count back from there.
        moment = block["time"] - begin - sum(block["seconds"])
        for spent, loss in zip(block["seconds"], block["loss"], strict=True):
            moment += spent
            if loss is not None:
                points.append((moment, loss))
    step = -(-len(points) // POINTS) or 1
    groups = [points[start : start + step] for start in range(0, len(points), step)]
    return (
        begin,
        [group[-1][0] for group in groups],
        [sum(loss for _, loss in group) / len(group) for group in groups],
    )


def _plot(
    panel: Any, title: str, curves: Sequence[tuple[Sequence[float], Sequence[float], str]]
) -> None:
    panel.set_title(title, loc="left", fontsize=10)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    for seconds, values, label in curves:
        marker = "o" if len(seconds) < 40 else None
        panel.plot(seconds, values, label=label or None, marker=marker, markersize=3, linewidth=1.3)
    if any(label for *_, label in curves):
        panel.legend(frameon=False, fontsize=9)


def _events(folder: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(folder.events_file(0)) if event.get("event") == kind]


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows]
