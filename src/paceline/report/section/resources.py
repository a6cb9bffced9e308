"""CPU, memory and network against time, for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.measure.resources import read_resources
from paceline.report import units
from paceline.report.buckets import Curve, shorten
from paceline.report.chart.line import LineChart, Series, draw_lines
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.run import Run
from paceline.report.section.outline import Outline, known, series
from paceline.report.shape import is_number

TITLE = "CPU, memory and network"
MOST_SERIES = 12


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What one node's samples tell, against seconds since the sampler began."""

    node: int
    cpu_percent: Curve
    rss_bytes: Curve
    sent_bytes_per_second: Curve
    received_bytes_per_second: Curve


def node_use(run: Run, node: int) -> NodeUse | None:
    """None where nothing was sampled."""
    samples = [
        sample
        for sample in read_resources(run.folder.resources_file(node))
        if is_number(sample["seconds"]) and is_number(sample["started"])
    ]
    if len(samples) < 2:
        return None
    return NodeUse(
        node,
        _level(samples, "cpu_percent"),
        _level(samples, "rss_bytes"),
        _rate(samples, "network_bytes_sent"),
        _rate(samples, "network_bytes_received"),
    )


def _seconds(sample: dict[str, Any], first: dict[str, Any]) -> float:
    return float(sample["started"] - first["started"] + sample["seconds"])


def _level(samples: Sequence[dict[str, Any]], key: str) -> Curve:
    pairs = [
        (_seconds(sample, samples[0]), sample[key])
        for sample in samples
        if is_number(sample.get(key))
    ]
    return _curve(pairs)


def _rate(samples: Sequence[dict[str, Any]], key: str) -> Curve:
    """Bytes a second between one sample and the next of the same sampler."""
    pairs = [
        (
            _seconds(later, samples[0]),
            (later[key] - earlier[key]) / (later["seconds"] - earlier["seconds"]),
        )
        for earlier, later in pairwise(samples)
        if is_number(later.get(key))
        and is_number(earlier.get(key))
        and earlier["started"] == later["started"]
        and later["seconds"] > earlier["seconds"]
    ]
    return _curve(pairs)


def _curve(pairs: Sequence[tuple[float, float]]) -> Curve:
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return shorten(values[:, 0], values[:, 1])


def build(outline: Outline) -> list[Block]:
    uses = []
    for cell in outline.drawn:
        run = next(iter(cell.finished or cell.runs), None)
        if run is None:
            continue
        for node in range(run.config.nnodes):
            use = node_use(run, node)
            if use is not None:
                several = f", node {node}" if run.config.nnodes > 1 else ""
                uses.append((f"{cell.label}{several}", use, outline.place(cell)))
    blocks: list[Block] = []
    if uses:
        blocks += _figures(outline, uses)
    if len(uses) > MOST_SERIES:
        blocks.append(Text(f"Figures show {MOST_SERIES} of {len(uses)} nodes.", "note"))
    rows = _rows(outline)
    if rows:
        blocks.append(Table(_COLUMNS, rows))
    gpus = _gpu_rows(outline)
    if gpus:
        columns = ("cell, node, GPU", "utilisation, mean", "memory, peak", "power, mean")
        blocks.append(Table(columns, gpus))
    if blocks:
        blocks.append(
            Text(
                "Of all processes of a run; 100 % of CPU is one core. Memory is resident memory"
                " added up over processes. Network is what the node's interfaces carried, whoever"
                " sent it. Curves are of the first finished run of a cell.",
                "note",
            )
        )
    return blocks


_COLUMNS = (
    "cell, node", "CPU, mean", "memory, mean", "memory, peak", "peak, shared pages once",
    "network sent", "network received",
)  # fmt: skip


def _figures(outline: Outline, uses: Sequence[tuple[str, NodeUse, int]]) -> list[Block]:
    shown = uses[:MOST_SERIES]
    by_cell = len({place for _, _, place in shown}) == len(shown)
    quantities = (
        ("cpu", "CPU", "CPU, % of one core", "", [use.cpu_percent for _, use, _ in shown]),
        ("memory", "Memory", "memory", "bytes", [use.rss_bytes for _, use, _ in shown]),
        ("sent", "Network, sent", "sent", "bytes_per_second",
         [use.sent_bytes_per_second for _, use, _ in shown]),
        ("received", "Network, received", "received", "bytes_per_second",
         [use.received_bytes_per_second for _, use, _ in shown]),
    )  # fmt: skip
    figures: list[Block] = []
    for name, title, label, quantity, curves in quantities:
        drawn: list[Series] = [
            series(text, curve, place if by_cell else index)
            for index, ((text, _, place), curve) in enumerate(zip(shown, curves, strict=True))
            if len(curve)
        ]
        if not drawn or not any(value for one in drawn for value in one.y):
            continue
        chart = LineChart(f"{title} against time", "time since sampling began", label, drawn,
                          "seconds", quantity, from_zero=True)  # fmt: skip
        figures.append(Figure(outline.figure("resources", name), chart.label, draw_lines(chart)))
    return figures


def _rows(outline: Outline) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for cell in outline.finished:
        nodes: dict[int, list[dict[str, Any]]] = {}
        for run in cell.finished:
            for node in run.nodes:
                if is_number(node.get("rss_bytes_peak")):
                    nodes.setdefault(int(node.get("node", 0)), []).append(node)
        for number, samples in sorted(nodes.items()):
            several = f", node {number}" if len(nodes) > 1 else ""
            rows.append(
                (
                    f"{cell.label}{several}",
                    units.spread(_of(samples, "cpu_percent_mean"), units.percent),
                    units.spread(_of(samples, "rss_bytes_mean"), units.size),
                    units.spread(_of(samples, "rss_bytes_peak"), units.size),
                    units.spread(_of(samples, "pss_bytes_peak"), units.size),
                    units.spread(_of(samples, "network_bytes_sent"), units.size),
                    units.spread(_of(samples, "network_bytes_received"), units.size),
                )
            )
    return rows


def _gpu_rows(outline: Outline) -> list[tuple[str, ...]]:
    """Of the first finished run of each cell."""
    rows: list[tuple[str, ...]] = []
    for cell in outline.finished:
        for node in cell.finished[0].nodes:
            for gpu in node.get("gpus") or ():
                if not isinstance(gpu, dict):
                    continue
                watts = _of([gpu], "power_watts_mean")
                rows.append(
                    (
                        f"{cell.label}, node {node.get('node', 0)}, GPU {gpu.get('gpu', '?')}",
                        units.spread(_of([gpu], "utilisation_percent_mean"), units.percent),
                        units.spread(_of([gpu], "memory_used_bytes_peak"), units.size),
                        f"{watts[0]:.0f} W" if watts else "-",
                    )
                )
    return rows


def _of(nodes: Sequence[dict[str, Any]], key: str) -> list[float]:
    return known(node[key] if is_number(node.get(key)) else None for node in nodes)
