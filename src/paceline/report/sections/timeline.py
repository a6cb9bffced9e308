"""One step of each cell from its trace: what was computed, what was sent, and what overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import formatting
from paceline.analysis.phases import COMPUTE_PHASES
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.errors import RecordsError
from paceline.records import read_json
from paceline.report.charts.bars import COLOURS
from paceline.report.charts.timeline import Lane, Span, Step, draw_timeline
from paceline.report.document import Block, Figure, Text
from paceline.report.sections.outline import SectionContext

TITLE = "Timeline of one iteration"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One iteration of one worker, in seconds since it began."""

    rank: int
    iteration: int
    seconds: float
    phases: list[Span]
    transfers: list[Span]

    @property
    def sending_seconds(self) -> float:
        """With at least one transfer under way."""
        return _length(_union(self.transfers))

    @property
    def hidden_seconds(self) -> float:
        """Of these, beside computing."""
        computing = _union(span for span in self.phases if span.kind in COMPUTE_PHASES)
        return sum(
            max(0.0, min(end, last) - max(begin, first))
            for begin, end in _union(self.transfers)
            for first, last in computing
        )


def read_step(path: Path, iteration: int | None = None) -> TracedStep | None:
    """The traced iteration of median length, or this one if it was traced; None without any."""
    try:
        trace = read_json(path)
    except RecordsError:
        return None
    laps = [lap for lap in _objects(trace.get("iterations")) if _is_timed(lap)]
    if not laps:
        return None
    asked = [lap for lap in laps if iteration is not None and lap.get("iteration") == iteration]
    lap = sorted(asked or laps, key=lambda one: float(one["dur"]))[(len(asked or laps) - 1) // 2]
    begin, end = lap["ts"] / 1e6, (lap["ts"] + lap["dur"]) / 1e6
    events = [event for event in _objects(trace.get("traceEvents")) if _is_timed(event)]
    return TracedStep(
        _whole(trace.get("rank")),
        _whole(lap.get("iteration")),
        end - begin,
        list(_spans(events, "phase", begin, end)),
        list(_spans(events, "transfer", begin, end)),
    )


def _whole(value: Any) -> int:
    return int(value) if is_number(value) else 0


def _objects(values: Any) -> list[dict[str, Any]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def _is_timed(event: dict[str, Any]) -> bool:
    return is_number(event.get("ts")) and is_number(event.get("dur")) and event["dur"] >= 0


def _spans(
    events: Iterable[dict[str, Any]], category: str, begin: float, end: float
) -> Iterable[Span]:
    """Those of a category that lie in the step, cut off at its ends."""
    for event in events:
        if event.get("cat") != category:
            continue
        first, last = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        first, last = max(first, begin) - begin, min(last, end) - begin
        kind = str(event.get("name", ""))
        if last <= first or kind not in COLOURS:
            continue
        details = event.get("args")
        size = details.get("bytes") if isinstance(details, dict) else None
        yield Span(kind, first, last, formatting.size(size) if is_number(size) else "")


def _union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times covered, each once."""
    covered: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.begin_seconds):
        if covered and span.begin_seconds <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], span.end_seconds)
        else:
            covered.append((span.begin_seconds, span.end_seconds))
    return covered


def _length(covered: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in covered)


def steps_of(cell: RunGroup) -> list[TracedStep]:
    """Of the first and the last worker of the first run that was traced."""
    for run in cell.shown:
        files = sorted(
            (path for path in run.folder.path.glob("trace-*.json") if path.stem[6:].isdecimal()),
            key=lambda path: int(path.stem[6:]),
        )
        first = read_step(files[0]) if files else None
        if first is not None:
            last = read_step(files[-1], first.iteration) if len(files) > 1 else None
            return [first] if last is None else [first, last]
    return []


def build(outline: SectionContext) -> list[Block]:
    steps = []
    for cell in outline.plotted:
        for traced in steps_of(cell):
            lanes = [Lane("phases", traced.phases)]
            if traced.transfers:
                lanes.append(Lane("transfers", traced.transfers))
            label = f"{cell.label}: rank {traced.rank}, iteration {traced.iteration}"
            steps.append(Step(label, _summary(traced), lanes))
    if not steps:
        return []
    title = "One iteration: phases, and transfers below them"
    return [
        Figure(outline.figure("timeline"), title, draw_timeline(title, steps), is_wide=True),
        Text(
            "Of the first and the last worker, the step that was of median length at the first. A"
            " transfer below"
            " backward is overlapped communication; one below exchange is exposed.",
            "note",
        ),
    ]


def _summary(traced: TracedStep) -> str:
    text = formatting.seconds(traced.seconds)
    if not traced.transfers:
        return text
    hidden = traced.hidden_seconds / traced.sending_seconds if traced.sending_seconds else 0.0
    return (
        f"{text}, transfers in flight {formatting.seconds(traced.sending_seconds)},"
        f" {100 * hidden:.0f}% of that overlapped"
    )
