"""One traced iteration: its phases, its transfers, and how much of these overlaps with compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.phases import COMPUTE_PHASES
from paceline.analysis.run_group import RunGroup
from paceline.analysis.validation import is_number
from paceline.errors import RecordsError
from paceline.records import PHASES, TRAFFIC_KINDS, read_json

_KINDS = frozenset((*PHASES, *TRAFFIC_KINDS))


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A phase or a transfer, in seconds since the iteration began."""

    kind: str
    begin_seconds: float
    end_seconds: float
    bytes: float | None
    """Size of a transfer; None for a phase."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One iteration of one worker."""

    rank: int
    iteration: int
    seconds: float
    phases: list[TraceSpan]
    transfers: list[TraceSpan]

    @property
    def transfer_seconds(self) -> float:
        """Time with at least one transfer in flight."""
        return sum(end - begin for begin, end in _union(self.transfers))

    @property
    def overlapped_seconds(self) -> float:
        """The part of `transfer_seconds` during compute."""
        compute = _union(span for span in self.phases if span.kind in COMPUTE_PHASES)
        return sum(
            max(0.0, min(end, last) - max(begin, first))
            for begin, end in _union(self.transfers)
            for first, last in compute
        )

    @property
    def overlapped_share(self) -> float:
        """Of the time with a transfer in flight."""
        total = self.transfer_seconds
        return self.overlapped_seconds / total if total else 0.0


def traced_steps(group: RunGroup) -> list[TracedStep]:
    """The same iteration of the first and the last rank of the first traced run."""
    for run in group.shown:
        files = sorted(
            (path for path in run.folder.path.glob("trace-*.json") if path.stem[6:].isdecimal()),
            key=lambda path: int(path.stem[6:]),
        )
        first = read_step(files[0]) if files else None
        if first is not None:
            last = read_step(files[-1], first.iteration) if len(files) > 1 else None
            return [first] if last is None else [first, last]
    return []


def read_step(path: Path, iteration: int | None = None) -> TracedStep | None:
    """The given iteration if it was traced, else the one of median length; None without any."""
    try:
        trace = read_json(path)
    except RecordsError:
        return None
    steps = [step for step in _objects(trace.get("iterations")) if _is_timed(step)]
    if not steps:
        return None
    matching = [
        step for step in steps if iteration is not None and step.get("iteration") == iteration
    ]
    candidates = sorted(matching or steps, key=lambda step: float(step["dur"]))
    step = candidates[(len(candidates) - 1) // 2]
    begin, end = step["ts"] / 1e6, (step["ts"] + step["dur"]) / 1e6
    events = [event for event in _objects(trace.get("traceEvents")) if _is_timed(event)]
    return TracedStep(
        _whole(trace.get("rank")),
        _whole(step.get("iteration")),
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
) -> Iterator[TraceSpan]:
    """Events of a category, clipped to the iteration."""
    for event in events:
        if event.get("cat") != category:
            continue
        first, last = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        first, last = max(first, begin) - begin, min(last, end) - begin
        args = event.get("args")
        details = args if isinstance(args, dict) else {}
        # Collectives of a script have the name of the operation.
        kind = str(details.get("kind", event.get("name", "")))
        if last <= first or kind not in _KINDS:
            continue
        size = details.get("bytes")
        yield TraceSpan(kind, first, last, size if is_number(size) else None)


def _union(spans: Iterable[TraceSpan]) -> Sequence[tuple[float, float]]:
    """Disjoint intervals that cover the spans."""
    covered: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.begin_seconds):
        if covered and span.begin_seconds <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], span.end_seconds)
        else:
            covered.append((span.begin_seconds, span.end_seconds))
    return covered
