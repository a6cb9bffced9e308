"""Separates overlapped from exposed communication, for strategies that overlap the backward pass.

On a GPU, the times of a step are marks, which are known only after the GPU has passed them. Steps
are therefore accounted for later, so that the program can continue to submit work. The marks of a
captured step (training/gpu/cuda_graph.py) are recorded again by each replay, and each replay is
accounted for like a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.measure.timeline import Interval, Moment, Timeline, busy_seconds
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import StepMeter

MAX_UNACCOUNTED_STEPS = 64


@dataclass(frozen=True, slots=True)
class StepExchange:
    """The transfers of one step, in the order in which their gradients were ready."""

    transfers: list[Interval]
    backward_ended: Moment | None
    """The start of exposed communication, which the phase clock measures. None if the strategy
    waits inside the backward pass: communication is exposed after the last gradient is ready."""

    @property
    def is_over(self) -> bool:
        """Whether the device has passed all marks."""
        ends = (transfer.ended for transfer in self.transfers)
        return all(isinstance(end, float) or (end is not None and end.query()) for end in ends)


@dataclass(slots=True)
class CapturedExchange:
    """The steps of a CUDA graph: one, or none if the graph does not contain a step."""

    steps: list[StepExchange] = field(default_factory=list)
    accounted_until: int = 0
    """Number of accounted steps after which the marks of the last replay have been read."""


class ExchangeMeter(StepMeter):
    """Accounts for the transfers of each step."""

    def __init__(self, replica: Replica, timeline: Timeline) -> None:
        """`timeline` is the timeline of the device that computes the gradients."""
        self._replica, self._timeline = replica, timeline
        self._transfers: list[Interval] = []
        self._unaccounted: deque[StepExchange] = deque()
        self._accounted = 0
        self._capturing: CapturedExchange | None = None

    def begin(self) -> Interval:
        """Begin a transfer of what the current stream computes; the caller sets `ended`."""
        self._transfers.append(Interval.begin(self._timeline))
        return self._transfers[-1]

    def end_last(self, moment: Moment) -> None:
        """Set the end of the last transfer."""
        self._transfers[-1].ended = moment

    def end_step(self, backward_ended: Moment | None = None) -> list[Interval]:
        """End a step, all of whose transfers have an end; return them."""
        step = StepExchange(self._transfers, backward_ended)
        self._transfers = []
        if self._capturing is not None:
            self._capturing.steps.append(step)
        else:
            self._add(step)
        return step.transfers

    def settle(self) -> None:
        self._account_until(self._accounted + len(self._unaccounted))

    @contextmanager
    def capture(self) -> Iterator[CapturedExchange]:
        """Record the steps of a `with` block, which captures them, without accounting for them."""
        self._capturing = captured = CapturedExchange()
        try:
            yield captured
        finally:
            self._capturing, self._transfers = None, []

    def before_replay(self, captured: CapturedExchange) -> None:
        """Read the marks of the last replay, which the next one overwrites."""
        self._account_until(captured.accounted_until)

    def replayed(self, captured: CapturedExchange) -> None:
        """Account for a replay that was just launched."""
        for step in captured.steps:
            self._add(step)
        captured.accounted_until = self._accounted + len(self._unaccounted)

    def _add(self, step: StepExchange) -> None:
        self._unaccounted.append(step)
        while self._unaccounted and (
            len(self._unaccounted) > MAX_UNACCOUNTED_STEPS or self._unaccounted[0].is_over
        ):
            self._account_until(self._accounted + 1)

    def _account_until(self, count: int) -> None:
        while self._accounted < count and self._unaccounted:
            self._account_for(self._unaccounted.popleft())
            self._accounted += 1

    def _account_for(self, step: StepExchange) -> None:
        spans = [transfer.span() for transfer in step.transfers]
        if not spans:
            return
        if step.backward_ended is not None:
            ready = self._timeline.seconds(step.backward_ended)
        else:
            ready = spans[-1][0]
            self._replica.clock.expose("backward", ready, max(ready, *(end for _, end in spans)))
        self._replica.add_overlapped(busy_seconds(spans, until=ready))
