"""A timeline whose marks a test moves, as a GPU does when it passes them or replays a graph."""

from __future__ import annotations

from typing import Self

from paceline.measure.timeline import Moment, Timeline


class FakeMark:
    def __init__(self, at: float) -> None:
        self.at = at
        self.is_passed = True

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True

    def elapsed_time(self, end_event: Self, /) -> float:
        return (end_event.at - self.at) * 1000


class FakeGpuTimeline(Timeline):
    """A GPU whose time the test sets in `now`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks: list[FakeMark] = []

    def mark(self) -> Moment:
        self.marks.append(FakeMark(self.now))
        return self.marks[-1]

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, FakeMark)
        moment.synchronize()
        return moment.at

    def replay(self, marks: list[FakeMark], moments: list[float]) -> None:
        """Record marks again, as a graph that contains them; the GPU has not passed them yet."""
        for mark, at in zip(marks, moments, strict=True):
            assert mark.is_passed, "the marks of the last replay were not read"
            mark.at, mark.is_passed = at, False
