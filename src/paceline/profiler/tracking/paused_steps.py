"""Steps that are not recorded: what hooks note of them, and how their time is divided.

In a pause, hooks add up how long input and backward passes take, and note where steps end. What
else a step consists of is divided among the phases as in the recorded window before the pause
(recording_windows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


class Noted(NamedTuple):
    """Since the last call of `take`."""

    input_seconds: float
    backward_seconds: float
    batches: int
    samples: int


class PausedSteps:
    """What hooks note in a pause. They do it in each step, so nothing else happens then."""

    __slots__ = (
        "backward_began",
        "backward_seconds",
        "batches",
        "dataset",
        "has_batch",
        "input_seconds",
        "interrupt",
        "is_in_backward",
        "is_in_input",
        "is_training",
        "iterator",
        "last_samples",
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
        self.dataset: Any = None
        """The one that it is trained on."""
        self.iterator: Callable[[], Any] = lambda: None
        """A weak reference to the iterator of the last batch."""
        self.last_samples = 0
        """Of that batch."""
        self.updates_before_batch = -1
        """How many steps of optimizers there were before it."""
        self.has_batch = False
        """Whether a batch arrived and no model was called since."""
        self.is_in_input = self.is_in_backward = False
        self.backward_began = 0.0
        self.input_seconds = self.backward_seconds = 0.0
        self.batches = self.samples = 0

    def begin(
        self,
        thread: int,
        optimizer: Callable[[], Any],
        iterator: Callable[[], Any],
        is_training: bool,
    ) -> None:
        self.optimizer, self.iterator, self.is_training = optimizer, iterator, is_training
        self.dataset, self.updates_before_batch = getattr(iterator(), "_dataset", None), -1
        self.has_batch = self.is_in_input = self.is_in_backward = False
        self.take()
        self.thread = thread

    def end(self) -> None:
        self.thread, self.dataset = 0, None

    def is_usual(self, iterator: Any, updates: int) -> bool:
        """Whether the next batch is for training: of the same data, and not another one's of the
        same step."""
        if ref(iterator) is self.iterator:
            return True
        return iterator._dataset is self.dataset and self.updates_before_batch != updates

    def take(self) -> Noted:
        noted = Noted(self.input_seconds, self.backward_seconds, self.batches, self.samples)
        self.input_seconds = self.backward_seconds = 0.0
        self.batches = self.samples = 0
        return noted

    def add_batch(self, iterator: ref[Any], samples: int, updates: int) -> None:
        self.iterator, self.last_samples, self.updates_before_batch = iterator, samples, updates
        self.has_batch = True
        self.batches += 1
        self.samples += samples


@dataclass(frozen=True, slots=True)
class UsualStep:
    """The mean step of a recorded window."""

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
    def of(
        cls, phases: Mapping[str, float], exposed_in_backward: float, step_seconds: Sequence[float]
    ) -> UsualStep:
        """`phases`: the seconds of a window in each of them."""
        steps, limit = len(step_seconds), LONG * median(step_seconds)
        spent = {name: max(0.0, phases[name]) for name in PHASES if name not in OUTSIDE}
        # What the script does between some of the steps only.
        once = sum(seconds - limit / LONG for seconds in step_seconds if seconds > limit)
        spent["other"] = max(0.0, spent["other"] - once)
        backward = spent["backward"] + exposed_in_backward
        total = sum(spent.values())
        rest = {name: value for name, value in spent.items() if name not in MEASURED}
        rest["exchange"] = max(0.0, rest["exchange"] - exposed_in_backward)
        divisor = sum(rest.values())
        return cls(
            total / steps,
            spent["input"] / steps,
            backward / steps,
            exposed_in_backward / backward if backward else 0.0,
            {name: value / divisor for name, value in rest.items()} if divisor else {"other": 1.0},
        )

    def excess(self, step_seconds: Sequence[float]) -> float:
        """What long steps took beyond the usual."""
        limit = LONG * self.seconds
        return sum(seconds - self.seconds for seconds in step_seconds if seconds > limit)

    def unusual(self, step_seconds: Sequence[float], noted: Noted) -> float:
        """The part of the excess that is neither input nor backward passes."""
        count = len(step_seconds)
        more_input = max(0.0, noted.input_seconds - count * self.input_seconds)
        more_backward = max(0.0, noted.backward_seconds - count * self.backward_seconds)
        return max(0.0, self.excess(step_seconds) - more_input - more_backward)

    def divide(
        self, clock: PhaseClock, step_seconds: Sequence[float], noted: Noted, waited: float
    ) -> None:
        """Divide the time of steps, which is part of phase other until now.

        What is not usual in them stays there. `waited` of the backward passes was not usual.
        """
        backward = noted.backward_seconds - waited
        exchange = self.exchange_share * backward
        measured = noted.input_seconds + noted.backward_seconds
        rest = sum(step_seconds) - measured - self.unusual(step_seconds, noted)
        clock.move("other", "input", noted.input_seconds)
        clock.move("other", "backward", backward - exchange)
        clock.move("other", "exchange", exchange)
        clock.move("other", "wait", waited)
        for phase, share in self.rest.items():
            clock.move("other", phase, share * max(0.0, rest))
