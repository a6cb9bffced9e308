"""What runs use: traffic, bandwidth, CPU, memory, network and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paceline import formatting
from paceline.analysis.communication import (
    AllReduceBandwidth,
    BucketChoice,
    CommMeasurement,
    KindTraffic,
    all_reduce_bandwidth,
    bucket_choice,
    group_traffic,
    read_comm_measurements,
)
from paceline.analysis.resources import (
    RESOURCE_KEYS,
    NodeCurves,
    first_node_ratios,
    gpus_by_name,
    host_copies,
    kernel_time,
    node_curves,
    nodes_by_number,
    record_values,
)
from paceline.analysis.run_group import RunGroup
from paceline.records import TRAFFIC_KINDS
from paceline.report.charts.bars import Bar, BarChart, Part, draw_bars
from paceline.report.charts.lines import LineChart
from paceline.report.document import Block, Figure, Table
from paceline.report.sections.common import (
    Column,
    SectionContext,
    answer,
    curve_series,
    line_figure,
    note,
    section,
    table,
)

MAX_MEASUREMENTS = 200
MAX_SERIES = 12
"""Nodes in a figure."""


class TrafficRow(NamedTuple):
    group: RunGroup
    kind: str
    traffic: KindTraffic


@section("traffic", "Traffic by kind")
def traffic(context: SectionContext) -> Iterator[Block]:
    found = [(group, kinds) for group in context.finished if (kinds := group_traffic(group))]
    if not found:
        return
    if not context.is_one_run:
        yield from _traffic_figure(context, found)
    yield table(
        [TrafficRow(group, kind, one) for group, kinds in found for kind, one in kinds.items()],
        Column("configuration", lambda row: row.group.label),
        Column("kind", lambda row: row.kind),
        Column("bytes per iteration", lambda row: row.traffic.bytes_per_iteration, formatting.size),
        Column("total bytes", lambda row: row.traffic.bytes_sent, formatting.size),
        Column("messages", lambda row: row.traffic.messages, formatting.count),
        Column("in flight", lambda row: row.traffic.seconds, formatting.seconds),
        text_columns=2,
    )
    text = (
        "Total over all workers, payload only"
        f"{'' if context.is_one_run else ', mean over the finished repeats'}."
        " In flight: time with a transfer open, maximum over ranks."
    )
    if any(run.is_resized for group, _ in found for run in group.finished):
        text += (
            " Where the world size changed, traffic is that of the final workers, each since it"
            " joined."
        )
    yield note(text)


def _traffic_figure(
    context: SectionContext, found: Sequence[tuple[RunGroup, dict[str, KindTraffic]]]
) -> Iterator[Figure]:
    bars = []
    for group, kinds in found:
        rates = {kind: one.bytes_per_iteration for kind, one in kinds.items()}
        known = {kind: rate for kind, rate in rates.items() if rate is not None}
        if known and context.is_plotted(group):
            parts = [Part(kind, rate, formatting.size(rate)) for kind, rate in known.items()]
            bars.append(Bar(group.label, parts, formatting.size(sum(known.values()))))
    if bars:
        title = "Bytes sent per iteration by all workers"
        legend = [kind for kind in TRAFFIC_KINDS if any(kind in kinds for _, kinds in found)]
        chart = BarChart(title, "sent per iteration", bars, "bytes", legend)
        yield Figure(context.figure_name("traffic"), title, draw_bars(chart))


@section("bandwidth", "Bandwidth")
def bandwidth(context: SectionContext) -> Iterator[Block]:
    measured = [one for path in context.comm for one in read_comm_measurements(path)]
    found = (all_reduce_bandwidth(group, measured) for group in context.groups)
    rates = [rate for rate in found if rate is not None]
    if rates:
        yield _bandwidth_table(rates)
        yield note(
            "Reduced: bytes of gradients per iteration. T: time per iteration with their transfers"
            " in flight, minimum over ranks; overlapped communication takes longer without"
            " blocking training. Algorithm bandwidth: bytes / T. Bus bandwidth: algorithm bandwidth"
            " x 2 (P - 1) / P. Reference bandwidth: bytes log2 P / T, with utilization"
            " 2 (P - 1) bytes / T / reference bandwidth. Link: the bandwidth measured in the"
            " emulated cluster, or the limit that `paceline comm` found with the same number of"
            " workers."
        )
    choices = [choice for group in context.groups if (choice := bucket_choice(group)) is not None]
    if choices:
        yield _bucket_table(choices)
        yield note(
            "Gradient buckets of `overlap` and why they have this size. Backward pass, latency and"
            " all-reduce bandwidth are measured in the first iterations; during the backward pass,"
            " communication and computation share the CPU."
        )
    if measured:
        yield _measured_table(measured[:MAX_MEASUREMENTS])
        names = ", ".join(f"`{path.name}`" for path in context.comm)
        yield note(f"By `paceline comm`: {names}.")


def _bucket_table(choices: Sequence[BucketChoice]) -> Table:
    return table(
        choices,
        Column("configuration", lambda one: one.label),
        Column("buckets", lambda one: one.count, formatting.count),
        Column("full at", lambda one: one.bucket_bytes if one.count > 1 else None, formatting.size),
        Column("reason", lambda one: one.reason),
        Column("backward pass", lambda one: one.backward_seconds, formatting.seconds),
        Column("latency", lambda one: one.latency_seconds, formatting.seconds),
        Column("all-reduce after it", lambda one: one.bytes_per_second, formatting.rate),
        Column("during it", lambda one: one.overlapped_bytes_per_second, formatting.rate),
    )


def _bandwidth_table(rates: Sequence[AllReduceBandwidth]) -> Table:
    return table(
        rates,
        Column("configuration", lambda rate: rate.label),
        Column("workers", lambda rate: rate.workers, formatting.count),
        Column("reduced", lambda rate: rate.bytes, formatting.size),
        Column("time T", lambda rate: rate.seconds, formatting.seconds),
        Column("algorithm bandwidth", lambda rate: rate.algorithm_bandwidth, formatting.rate),
        Column("bus bandwidth", lambda rate: rate.bus_bandwidth, formatting.rate),
        Column("reference bandwidth", lambda rate: rate.reference_bandwidth, formatting.rate),
        Column("reference utilization", lambda rate: f"{rate.reference_utilization:.2f}"),
        Column("bus bandwidth / link", lambda rate: rate.link_share, formatting.share),
    )


def _measured_table(measured: Sequence[CommMeasurement]) -> Table:
    return table(
        measured,
        Column("operation", lambda one: one.operation),
        Column("workers", lambda one: one.workers, formatting.count),
        Column("size", lambda one: one.bytes, formatting.size),
        Column("time, median", lambda one: one.seconds, formatting.seconds),
        Column("algorithm bandwidth", lambda one: one.algorithm_bandwidth, formatting.rate),
        Column("bus bandwidth", lambda one: one.bus_bandwidth, formatting.rate),
        Column("share of limit", lambda one: one.limit_share, formatting.share),
    )


class NodeSeries(NamedTuple):
    label: str
    curves: NodeCurves
    color_index: int


@section("resources", "CPU, memory and network")
def resources(context: SectionContext) -> Iterator[Block]:
    blocks = list(_resources(context))
    yield from blocks
    if blocks:
        yield note(
            "Totals over all processes of a run; 100% of CPU is one core. Memory is the sum of"
            " resident memory. Network is all traffic of the node's interfaces, including that of"
            " other processes."
            + (
                ""
                if context.is_one_run
                else " Curves show the first finished run of each configuration."
            )
        )


def _resources(context: SectionContext) -> Iterator[Block]:
    if len(context.finished) == 1:
        text = _resource_answer(context.finished[0])
        label = context.finished[0].label
        yield answer(text if context.is_one_run else f"{label}: {text}")
    series = list(_node_series(context))
    if series:
        plotted = _choose_nodes(series)
        yield from _resource_figures(context, plotted)
        if len(series) > MAX_SERIES:
            yield note(
                f"Figures show {len(plotted)} of {len(series)} nodes, the first of each"
                " configuration."
            )
    yield from _node_table(context.finished)
    ratios = [(group, ratio) for group in context.finished if (ratio := first_node_ratios(group))]
    if ratios:
        yield table(
            ratios,
            Column("node 0 / mean of the other nodes", lambda row: row[0].label),
            *map(_ratio_column, RESOURCE_KEYS),
        )
    yield from _gpu_tables(context.finished)


def _resource_answer(group: RunGroup) -> str:
    """Time, CPU and memory of one configuration, summed over nodes."""
    figures = (
        (group.values(lambda run: run.wall_seconds), formatting.seconds, "of wall time"),
        (group.values(lambda run: run.command_seconds), formatting.seconds, "of the command"),
        (_node_sums(group, "cpu_percent_mean"), formatting.cores, "on average"),
        (_node_sums(group, "rss_bytes_mean"), formatting.size, "of memory on average"),
        (_node_sums(group, "rss_bytes_peak"), formatting.size, "at its peak"),
    )
    parts = [
        f"{formatting.spread(values, format)} {what}" for values, format, what in figures if values
    ]
    return f"{', '.join(parts)}."


def _node_sums(group: RunGroup, key: str) -> list[float]:
    return group.values(lambda run: run.node_sum(key))


def _node_series(context: SectionContext) -> Iterator[NodeSeries]:
    for group in context.plotted:
        run = next(iter(group.shown), None)
        for node in range(run.settings.nnodes) if run is not None else ():
            curves = node_curves(run, node) if run is not None else None
            if run is not None and curves is not None:
                suffix = f", node {node}" if run.settings.nnodes > 1 else ""
                yield NodeSeries(f"{group.label}{suffix}", curves, context.color_index(group))


def _choose_nodes(series: Sequence[NodeSeries]) -> Sequence[NodeSeries]:
    """As many nodes of each group as a figure holds, the first ones."""
    most = max(one.curves.node for one in series) + 1
    for count in range(most, 0, -1):
        chosen = [one for one in series if one.curves.node < count]
        if len(chosen) <= MAX_SERIES:
            return chosen
    return chosen[:MAX_SERIES]


def _resource_figures(context: SectionContext, nodes: Sequence[NodeSeries]) -> Iterator[Figure]:
    has_one_node_each = len({one.color_index for one in nodes}) == len(nodes)
    for name, title, label, quantity, curves in (
        ("cpu", "CPU", "CPU, % of one core", "", [one.curves.cpu_percent for one in nodes]),
        ("memory", "Memory", "memory", "bytes", [one.curves.rss_bytes for one in nodes]),
        ("sent", "Network, sent", "sent", "bytes_per_second",
         [one.curves.sent_bytes_per_second for one in nodes]),
        ("received", "Network, received", "received", "bytes_per_second",
         [one.curves.received_bytes_per_second for one in nodes]),
    ):  # fmt: skip
        series = [
            curve_series(one.label, curve, one.color_index if has_one_node_each else index)
            for index, (one, curve) in enumerate(zip(nodes, curves, strict=True))
            if len(curve)
        ]
        if any(value for one in series for value in one.y):
            chart = LineChart(f"{title} against time", "time since sampling began", label, series,
                              "seconds", quantity, from_zero=True)  # fmt: skip
            yield line_figure(context.figure_name("resources", name), chart)


class LabeledRecords(NamedTuple):
    label: str
    records: Sequence[dict[str, Any]]
    """One per run."""


def _record_column(heading: str, key: str, format: Any) -> Column[LabeledRecords]:
    return Column(heading, lambda row: record_values(row.records, key), format)


def _node_table(groups: Sequence[RunGroup]) -> Iterator[Table]:
    rows = [
        LabeledRecords(group.label + (f", node {number}" if len(nodes) > 1 else ""), records)
        for group in groups
        if (nodes := nodes_by_number(group))
        for number, records in nodes.items()
    ]
    if rows:
        yield table(
            rows,
            Column("configuration, node", lambda row: row.label),
            _record_column("CPU, mean", "cpu_percent_mean", formatting.percent),
            _record_column("memory, mean", "rss_bytes_mean", formatting.size),
            _record_column("memory, peak", "rss_bytes_peak", formatting.size),
            _record_column("peak PSS", "pss_bytes_peak", formatting.size),
            _record_column("network sent", "network_bytes_sent", formatting.size),
            _record_column("network received", "network_bytes_received", formatting.size),
        )


def _ratio_column(resource: str) -> Column[tuple[RunGroup, dict[str, list[float]]]]:
    return Column(resource, lambda row: row[1][resource], lambda value: f"{value:.2f}")


def _gpu_tables(groups: Sequence[RunGroup]) -> Iterator[Block]:
    rows = [
        LabeledRecords(f"{group.label}, {name}", records)
        for group in groups
        for name, records in gpus_by_name(group).items()
    ]
    if rows:
        yield table(
            rows,
            Column("configuration, node, GPU", lambda row: row.label),
            _record_column(
                "NVML busy, training", "utilisation_percent_training_mean", formatting.percent
            ),
            _record_column("NVML busy, whole run", "utilisation_percent_mean", formatting.percent),
            _record_column("memory, peak", "memory_used_bytes_peak", formatting.size),
            _record_column("power, mean", "power_watts_mean", lambda value: f"{value:.0f} W"),
        )
        yield note(
            "NVML busy: share of the time in which a kernel of any process ran on the GPU, sampled"
            " by its driver. Training is from the first to the last block of iterations, with"
            " evaluation; the whole run includes the start-up."
        )
    kernels = [(group, one) for group in groups if (one := kernel_time(group)) is not None]
    if kernels:
        yield table(
            kernels,
            Column("configuration, traced iterations", lambda row: row[0].label),
            Column("iterations", lambda row: row[1].iterations, formatting.count),
            Column(
                "kernel time each", lambda row: row[1].seconds_per_iteration, formatting.seconds
            ),
            Column("kernel time, share", lambda row: row[1].shares, formatting.share),
        )
        yield note(
            "Kernel time (CUPTI): time in which a kernel of the worker ran during the iterations of"
            " --trace, mean over workers and runs. Recording slows launches, so the share is a"
            " lower bound of that in other iterations."
        )
    rows = [
        LabeledRecords(group.label, copies) for group in groups if (copies := host_copies(group))
    ]
    if rows:
        yield table(
            rows,
            Column("configuration, copies to the GPU", lambda row: row.label),
            _record_column("per iteration", "count", lambda value: f"{value:.1f}"),
            _record_column("bytes", "bytes", formatting.size),
            _record_column("from pageable memory", "pageable_share", formatting.share),
            _record_column("program", "seconds", formatting.seconds),
            _record_column("GPU", "gpu_seconds", formatting.seconds),
        )
        yield note(
            "Copies from the host to the GPU per iteration, mean over workers and runs. Program:"
            " what the calls took; a copy from pageable memory, or one without non_blocking=True,"
            " waits for all work of the GPU before it."
        )
