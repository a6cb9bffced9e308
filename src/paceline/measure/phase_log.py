"""When each phase began and ended, for as long as somebody watches a phase clock."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter


@dataclass(slots=True)
class Span:
    """A stretch of time, in seconds of this machine's performance counter."""

    name: str
    began: float
    ended: float


@dataclass(slots=True)
class PhaseLog:
    phases: list[Span] = field(default_factory=list)
    """In order, each beginning where the one before ended."""
    laps: list[Span] = field(default_factory=list)

    def relabel(self, source: str, target: str, began: float, ended: float) -> None:
        """What was logged as `source` within this stretch turned out to be `target`."""
        index = max(0, bisect_right(self.phases, began, key=attrgetter("began")) - 1)
        while index < len(self.phases) and self.phases[index].began < ended:
            phase = self.phases[index]
            begin, end = max(phase.began, began), min(phase.ended, ended)
            if phase.name != source or begin >= end:
                index += 1
                continue
            pieces = (
                Span(source, phase.began, begin),
                Span(target, begin, end),
                Span(source, end, phase.ended),
            )
            kept = [piece for piece in pieces if piece.began < piece.ended]
            self.phases[index : index + 1] = kept
            index += len(kept)
