"""Steps that are not recorded: what hooks note of them, and how their time is divided.

In a pause, hooks add up how long input and backward passes take, and note where steps end. What
else a step consists of is divided among the phases as in the recorded window before the pause
(recording_windows.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple
from weakref import ref

from paceline.measure.phase_clock import PhaseClock
from paceline.records import PHASES

OUTSIDE = frozenset(("evaluate", "checkpoint"))
"""Phases that are not part of a step."""
MEASURED = ("input", "backward")
"""Phases that are measured in pauses, too."""
LONG = 4.0
"""A step that takes longer than this multiple of the usual one contains something else."""


class Measured(NamedTuple):
    """Of a step that is not recorded, or of all of them since the pause began."""

    input_seconds: float
    backward_seconds: float


class Noted(NamedTuple):
    """Since the last call of `take`."""

    input_seconds: float
    backward_seconds: float
    """With those of the unfinished step."""
    samples: int
    steps: Sequence[Measured]
    """Those that ended."""


class PausedSteps:
    """What hooks note in a pause. They do it in each step, so nothing else happens then."""

    __slots__ = (
        "backward_began",
        "backward_seconds",
        "batches",
        "counted_seconds",
        "dataset_id",
        "ends",
        "has_batch",
        "input_began",
        "input_seconds",
        "interrupt",
        "is_in_backward",
        "is_in_input",
        "is_in_update",
        "is_training",
        "iterator",
        "last_end",
        "last_samples",
        "last_taken",
        "optimizer",
        "samples",
        "thread",
        "updates_before_batch",
    )

    def __init__(self) -> None:
        self.thread = 0
        """The one that trains; 0 if this is no pause."""
        self.interrupt: Callable[[], object] = lambda: None
        """Ends the pause: what follows is not part of usual steps."""
        self.optimizer: Callable[[], Any] | None = None
        """A weak reference to the one that ends steps."""
        self.is_training = True
        """Whether the model that is trained is in training mode."""
        self.dataset_id = 0
        """That of the one that it is trained on, which the script may free."""
        self.iterator: Callable[[], Any] = lambda: None
        """A weak reference to the iterator of the last batch."""
        self.last_samples = 0
        """Of that batch."""
        self.updates_before_batch = -1
        """How many steps of optimizers there were before it."""
        self.has_batch = False
        """Whether a batch arrived and no model was called since."""
        self.is_in_input = self.is_in_backward = self.is_in_update = False
        self.input_began = self.backward_began = 0.0
        self.input_seconds = self.backward_seconds = 0.0
        """Since the pause began."""
        self.ends: list[Measured] = []
        """What both were at the ends of steps."""
        self.last_end = self.last_taken = Measured(0.0, 0.0)
        """What both were at the last end, and at the last call of `take`."""
        self.samples = 0
        """Since that call."""
        self.batches = 0
        """Of the iterator, since they were counted for its loader."""
        self.counted_seconds = 0.0
        """What `input_seconds` was then."""

    def begin(
        self,
        thread: int,
        optimizer: Callable[[], Any],
        iterator: Callable[[], Any],
        is_training: bool,
    ) -> None:
        self.optimizer, self.iterator, self.is_training = optimizer, iterator, is_training
        self.dataset_id = id(getattr(iterator(), "_dataset", None))
        self.updates_before_batch = -1
        self.has_batch = self.is_in_input = self.is_in_backward = self.is_in_update = False
        self.input_seconds = self.backward_seconds = 0.0
        self.ends = []
        self.last_end = self.last_taken = Measured(0.0, 0.0)
        self.batches = self.samples = 0
        self.counted_seconds = 0.0
        self.thread = thread

    def end(self) -> None:
        self.thread = 0

    def is_usual(self, iterator: Any, updates: int) -> bool:
        """Whether the next batch is for training: of the same data, and not another one's of the
        same step."""
        if ref(iterator) is self.iterator:
            return True
        return id(iterator._dataset) == self.dataset_id and self.updates_before_batch != updates

    @property
    def measured(self) -> Measured:
        """Totals up to now."""
        return Measured(self.input_seconds, self.backward_seconds)

    def take(self) -> Noted:
        now, before = self.measured, self.last_taken
        ends = [self.last_end, *self.ends]
        noted = Noted(
            now.input_seconds - before.input_seconds,
            now.backward_seconds - before.backward_seconds,
            self.samples,
            [
                Measured(
                    end.input_seconds - begin.input_seconds,
                    end.backward_seconds - begin.backward_seconds,
                )
                for begin, end in pairwise(ends)
            ],
        )
        self.last_taken, self.last_end, self.ends = now, ends[-1], []
        self.samples = 0
        return noted

    def add_batch(self, iterator: ref[Any], samples: int, updates: int) -> None:
        self.iterator, self.last_samples, self.updates_before_batch = iterator, samples, updates
        self.has_batch = True
        self.batches += 1
        self.samples += samples


class StepPhases(NamedTuple):
    """Of a step that is recorded, or the totals up to its end."""

    seconds: Mapping[str, float]
    """By phase."""
    exposed_in_backward: float


@dataclass(frozen=True, slots=True)
class UsualStep:
    """The mean step of a recorded window, without long ones."""

    seconds: float
    """With everything that is part of a step."""
    input_seconds: float
    backward_seconds: float
    """With the communication that blocks the program in it."""
    exchange_share: float
    """What that communication is of the backward pass."""
    rest: Mapping[str, float]
    """Shares of the other phases, which are not measured in pauses."""

    @classmethod
    def of(cls, steps: Sequence[StepPhases]) -> UsualStep:
        """A long step may contain what the script does in some of the steps only, in any phase."""
        durations = [math.fsum(step.seconds.values()) for step in steps]
        limit = LONG * median(durations)
        usual = [one for one, seconds in zip(steps, durations, strict=True) if seconds <= limit]
        count = len(usual)
        spent = {
            name: max(0.0, math.fsum(step.seconds[name] for step in usual))
            for name in PHASES
            if name not in OUTSIDE
        }
        exposed = math.fsum(step.exposed_in_backward for step in usual)
        backward = spent["backward"] + exposed
        total = sum(spent.values())
        rest = {name: value for name, value in spent.items() if name not in MEASURED}
        rest["exchange"] = max(0.0, rest["exchange"] - exposed)
        divisor = sum(rest.values())
        return cls(
            total / count,
            spent["input"] / count,
            backward / count,
            exposed / backward if backward else 0.0,
            {name: value / divisor for name, value in rest.items()} if divisor else {"other": 1.0},
        )

    def is_long(self, seconds: float) -> bool:
        return seconds > LONG * self.seconds

    def more_backward(self, step: Measured) -> float:
        """What the backward passes of a long step took beyond the usual."""
        return max(0.0, step.backward_seconds - self.backward_seconds)

    def unusual(self, seconds: float, step: Measured) -> float:
        """The part of a long step's excess that is neither input nor backward passes."""
        if not self.is_long(seconds):
            return 0.0
        more_input = max(0.0, step.input_seconds - self.input_seconds)
        return max(0.0, seconds - self.seconds - more_input - self.more_backward(step))

    def divide(
        self, clock: PhaseClock, step_seconds: Sequence[float], noted: Noted, waited: float
    ) -> None:
        """Divide the time of steps, which is part of phase other until now.

        What is not usual in them stays there. `waited` of the backward passes was not usual.
        """
        backward = noted.backward_seconds - waited
        exchange = self.exchange_share * backward
        rest = math.fsum(
            seconds - step.input_seconds - step.backward_seconds - self.unusual(seconds, step)
            for seconds, step in zip(step_seconds, noted.steps, strict=True)
        )
        clock.move("other", "input", noted.input_seconds)
        clock.move("other", "backward", backward - exchange)
        clock.move("other", "exchange", exchange)
        clock.move("other", "wait", waited)
        for phase, share in self.rest.items():
            clock.move("other", phase, share * max(0.0, rest))


def steps_between(totals: Sequence[StepPhases]) -> list[StepPhases]:
    """The steps between totals that follow each other."""
    return [
        StepPhases(
            {
                name: value - begin.seconds[name]
                for name, value in end.seconds.items()
                if name not in OUTSIDE
            },
            end.exposed_in_backward - begin.exposed_in_backward,
        )
        for begin, end in pairwise(totals)
    ]
