"""What was sent, by kind, in bytes and messages."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.communication import KindTraffic, group_traffic
from paceline.analysis.run_group import RunGroup
from paceline.records import TRAFFIC_KINDS
from paceline.report.charts.bars import Bar, BarChart, Part, draw_bars
from paceline.report.document import Block, Figure, Table, Text
from paceline.report.sections.outline import SectionContext

TITLE = "Traffic by kind"
RESIZED = (
    " Where the number of workers changed, it is what those at the end sent, each since it joined."
)


def build(outline: SectionContext) -> list[Block]:
    found = [(cell, traffic) for cell in outline.finished if (traffic := group_traffic(cell))]
    if not found:
        return []
    is_resized = any(run.is_resized for cell, _ in found for run in cell.finished)
    return [
        *_figure(outline, found),
        Table(
            (
                "configuration",
                "kind",
                "bytes per iteration",
                "total bytes",
                "messages",
                "in flight",
            ),
            [
                (
                    cell.label,
                    kind,
                    formatting.size(one.bytes_per_iteration),
                    formatting.size(one.bytes_sent),
                    formatting.count(one.messages),
                    formatting.seconds(one.seconds),
                )
                for cell, traffic in found
                for kind, one in traffic.items()
            ],
            words=2,
        ),
        Text(
            "Sent by all workers together, payload only, on average over the finished repeats."
            " In flight: time with a transfer open, maximum over ranks."
            + (RESIZED if is_resized else ""),
            "note",
        ),
    ]


def _figure(
    outline: SectionContext, found: Sequence[tuple[RunGroup, dict[str, KindTraffic]]]
) -> list[Block]:
    bars = []
    for cell, traffic in found:
        rates = {kind: one.bytes_per_iteration for kind, one in traffic.items()}
        known = {kind: rate for kind, rate in rates.items() if rate is not None}
        if known and id(cell) in outline.places:
            parts = [Part(kind, rate, formatting.size(rate)) for kind, rate in known.items()]
            bars.append(Bar(cell.label, parts, formatting.size(sum(known.values()))))
    if not bars:
        return []
    title = "Bytes sent per iteration by all workers"
    kinds = [kind for kind in TRAFFIC_KINDS if any(kind in traffic for _, traffic in found)]
    chart = BarChart(title, "sent per iteration", bars, "bytes", kinds)
    return [Figure(outline.figure("traffic"), title, draw_bars(chart))]
