"""CPU, memory and network against time, for each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paceline import formatting
from paceline.analysis.curves import Curve, downsample
from paceline.analysis.run import Run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.measure.resources import read_resources
from paceline.report.charts.lines import LineChart, Series, draw_lines
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext, known, series

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
    return downsample(values[:, 0], values[:, 1])


def build(outline: SectionContext) -> list[Block]:
    uses = []
    for cell in outline.plotted:
        run = next(iter(cell.shown), None)
        if run is None:
            continue
        for node in range(run.config.nnodes):
            use = node_use(run, node)
            if use is not None:
                several = f", node {node}" if run.config.nnodes > 1 else ""
                uses.append((f"{cell.label}{several}", use, outline.place(cell)))
    blocks: list[Block] = []
    if len(outline.finished) == 1:
        blocks.append(Text(answer(outline.finished[0]), "answer"))
    if uses:
        blocks += _figures(outline, uses)
    if len(uses) > MOST_SERIES:
        count = len(_shown(uses))
        blocks.append(
            Text(
                f"Figures show {count} of {len(uses)} nodes, the first of each configuration.",
                "note",
            )
        )
    rows = _rows(outline)
    if rows:
        blocks.append(Table(_COLUMNS, rows))
    blocks += _first_node(outline)
    gpus = _gpu_rows(outline)
    if gpus:
        columns = ("configuration, node, GPU", "utilization, mean", "memory, peak", "power, mean")
        blocks.append(Table(columns, gpus))
    if blocks:
        blocks.append(
            Text(
                "Of all processes of a run; 100% of CPU is one core. Memory is resident memory"
                " added up over processes. Network is what the node's interfaces carried, whoever"
                " sent it. Curves are of the first finished run of a configuration.",
                "note",
            )
        )
    return blocks


def answer(cell: RunGroup) -> str:
    """What one cell took in time, CPU and memory, all nodes together."""
    runs = cell.finished
    walls = [run.result["wall_seconds"] for run in runs if run.result is not None]
    figures = (
        (walls, formatting.seconds, "of wall time"),
        (
            known(run.node_sum("cpu_percent_mean") for run in runs),
            formatting.percent,
            "CPU on average",
        ),
        (
            known(run.node_sum("rss_bytes_mean") for run in runs),
            formatting.size,
            "of memory on average",
        ),
        (known(run.node_sum("rss_bytes_peak") for run in runs), formatting.size, "at its peak"),
    )
    told = [f"{formatting.spread(values, text)} {what}" for values, text, what in figures if values]
    return f"{cell.label}: {', '.join(told)}."


_COLUMNS = (
    "configuration, node", "CPU, mean", "memory, mean", "memory, peak", "peak PSS",
    "network sent", "network received",
)  # fmt: skip


def _shown(uses: Sequence[tuple[str, NodeUse, int]]) -> Sequence[tuple[str, NodeUse, int]]:
    """As many nodes of each cell as can be told apart, the first ones; all where these are few."""
    most = max(use.node for _, use, _ in uses) + 1
    for count in range(most, 0, -1):
        shown = [one for one in uses if one[1].node < count]
        if len(shown) <= MOST_SERIES:
            return shown
    return shown[:MOST_SERIES]


def _figures(outline: SectionContext, uses: Sequence[tuple[str, NodeUse, int]]) -> list[Block]:
    shown = _shown(uses)
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


def _rows(outline: SectionContext) -> list[tuple[str, ...]]:
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
                    formatting.spread(_of(samples, "cpu_percent_mean"), formatting.percent),
                    formatting.spread(_of(samples, "rss_bytes_mean"), formatting.size),
                    formatting.spread(_of(samples, "rss_bytes_peak"), formatting.size),
                    formatting.spread(_of(samples, "pss_bytes_peak"), formatting.size),
                    formatting.spread(_of(samples, "network_bytes_sent"), formatting.size),
                    formatting.spread(_of(samples, "network_bytes_received"), formatting.size),
                )
            )
    return rows


_OVER_OTHERS = {
    "CPU": ("cpu_percent_mean",),
    "memory": ("rss_bytes_mean",),
    "network": ("network_bytes_sent", "network_bytes_received"),
}


def first_node_over_others(run: Run) -> dict[str, float] | None:
    """What node 0 uses over the mean of the other nodes; None where there is only one."""
    first = [node for node in run.nodes if not node.get("node", 0)]
    others = [node for node in run.nodes if node.get("node", 0)]
    if not first or not others:
        return None
    found = {}
    for name, keys in _OVER_OTHERS.items():
        own = sum(sum(_of(first, key)) for key in keys)
        theirs = sum(sum(_of(others, key)) for key in keys) / len(others)
        if own and theirs:
            found[name] = own / theirs
    return found or None


def _first_node(outline: SectionContext) -> list[Block]:
    """On average over the finished runs of each cell."""
    rows = []
    for cell in outline.finished:
        times = [one for run in cell.finished if (one := first_node_over_others(run)) is not None]
        if times:
            each = [known(one.get(name) for one in times) for name in _OVER_OTHERS]
            rows.append(
                (
                    cell.label,
                    *(formatting.spread(own, lambda value: f"{value:.2f}") for own in each),
                )
            )
    columns = ("node 0 over the mean of the other nodes", *_OVER_OTHERS)
    return [Table(columns, rows)] if rows else []


def _gpu_rows(outline: SectionContext) -> list[tuple[str, ...]]:
    """On average over the finished runs of each cell."""
    rows: list[tuple[str, ...]] = []
    for cell in outline.finished:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for run in cell.finished:
            for node in run.nodes:
                for gpu in node.get("gpus") or ():
                    if isinstance(gpu, dict):
                        name = f"node {node.get('node', 0)}, GPU {gpu.get('gpu', '?')}"
                        by_name.setdefault(name, []).append(gpu)
        for name, own in by_name.items():
            rows.append(
                (
                    f"{cell.label}, {name}",
                    formatting.spread(_of(own, "utilisation_percent_mean"), formatting.percent),
                    formatting.spread(_of(own, "memory_used_bytes_peak"), formatting.size),
                    formatting.spread(_of(own, "power_watts_mean"), lambda value: f"{value:.0f} W"),
                )
            )
    return rows


def _of(nodes: Sequence[dict[str, Any]], key: str) -> list[float]:
    return known(node[key] if is_number(node.get(key)) else None for node in nodes)
