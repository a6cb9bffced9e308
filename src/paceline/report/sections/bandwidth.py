"""Bandwidth of the exchanges of the runs, and as `paceline comm` measured it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.communication import AllReduceBandwidth, all_reduce_bandwidth, read_comm
from paceline.report.document import Block, Table, Text
from paceline.report.sections.outline import SectionContext

TITLE = "Bandwidth"

MOST_MEASURED = 200


def build(outline: SectionContext) -> list[Block]:
    measured = [one for path in outline.comm for one in read_comm(path)]
    found = (all_reduce_bandwidth(cell, measured) for cell in outline.cells)
    rates = [rate for rate in found if rate is not None]
    blocks: list[Block] = _of_runs(rates) if rates else []
    if measured:
        columns = ("measured alone", "workers", "size", "time, median", "algorithm bandwidth",
                   "bus bandwidth", "of the limit")  # fmt: skip
        rows = [
            (
                one.operation,
                formatting.count(one.workers),
                formatting.size(one.bytes),
                formatting.seconds(one.seconds),
                formatting.rate(one.algorithm_bandwidth),
                formatting.rate(one.bus_bandwidth),
                formatting.share(one.limit_share),
            )
            for one in measured[:MOST_MEASURED]
        ]
        names = ", ".join(f"`{path.name}`" for path in outline.comm)
        blocks += [Table(columns, rows), Text(f"By `paceline comm`: {names}.", "note")]
    return blocks


def _of_runs(rates: Sequence[AllReduceBandwidth]) -> list[Block]:
    columns = ("configuration", "workers", "summed", "time T", "algorithm bandwidth",
               "bus bandwidth", "reference bandwidth", "reference utilization",
               "bus, of the link")  # fmt: skip
    rows = [
        (
            rate.label,
            formatting.count(rate.workers),
            formatting.size(rate.bytes),
            formatting.seconds(rate.seconds),
            formatting.rate(rate.algorithm_bandwidth),
            formatting.rate(rate.bus_bandwidth),
            formatting.rate(rate.reference_bandwidth),
            f"{rate.reference_utilization:.2f}",
            formatting.share(rate.link_share),
        )
        for rate in rates
    ]
    return [
        Table(columns, rows),
        Text(
            "Per iteration: gradients summed, and T, the time with their transfers in flight at the"
            " worker that waited least. Algorithm bandwidth is bytes / T; bus bandwidth is that"
            " times 2 (P - 1) / P; the reference's is bytes log2 P / T, with utilization"
            " 2 (P - 1) bytes / T over it. Overlapped communication takes longer without"
            " blocking training. The link is as measured: in an emulated cluster, or the limit that"
            " `paceline comm` found with as many workers.",
            "note",
        ),
    ]
