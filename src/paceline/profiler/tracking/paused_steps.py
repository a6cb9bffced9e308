"""Steps that are not recorded: what hooks note of them, and how their time is divided.

In a pause, hooks add up how long input and backward passes take, and note where steps end. What
else a step consists of is divided among the phases as in the recorded window before the pause
(recording_windows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

from paceline.measure.phase_clock import PhaseClock
from paceline.records import PHASES

OUTSIDE = frozenset(("evaluate", "checkpoint"))
"""Phases that are not part of a step."""
MEASURED = ("input", "backward")
"""Phases that are measured in pauses, too."""


class Noted(NamedTuple):
    """Since the last call of `take`."""

    input_seconds: float
    backward_seconds: float
    batches: int
    samples: int


class PausedSteps:
    """What hooks note in a pause. They do it in each step, so nothing else happens then."""

    __slots__ = (
        "backward_seconds",
        "batches",
        "dataset",
        "input_seconds",
        "interrupt",
        "is_in_backward",
        "iterator",
        "last_samples",
        "samples",
        "thread",
        "updates",
    )

    def __init__(self) -> None:
        self.thread = 0
        """The one that trains; 0 if this is no pause."""
        self.interrupt: Callable[[], object] = lambda: None
        """Ends the pause: what follows is not part of usual steps."""
        self.dataset = 0
        """The id of the one that a model is trained on."""
        self.iterator: Callable[[], Any] = lambda: None
        """A weak reference to the iterator of the last batch."""
        self.last_samples = 0
        """Of that batch."""
        self.updates = -1
        """How many steps of optimizers there were before it."""
        self.is_in_backward = False
        self.input_seconds = self.backward_seconds = 0.0
        self.batches = self.samples = 0

    def begin(self, thread: int, iterator: Callable[[], Any]) -> None:
        self.thread, self.iterator, self.updates = thread, iterator, -1
        self.dataset = id(getattr(iterator(), "_dataset", None))
        self.take()

    def take(self) -> Noted:
        noted = Noted(self.input_seconds, self.backward_seconds, self.batches, self.samples)
        self.input_seconds = self.backward_seconds = 0.0
        self.batches = self.samples = 0
        return noted

    def add_batch(self, iterator: ref[Any], samples: int, updates: int) -> None:
        self.iterator, self.last_samples, self.updates = iterator, samples, updates
        self.batches += 1
        self.samples += samples


@dataclass(frozen=True, slots=True)
class UsualStep:
    """The mean step of a recorded window."""

    seconds: float
    """With everything that is part of a step."""
    backward_seconds: float
    """With the communication that blocks the program in it."""
    exchange_share: float
    """What that communication is of the backward pass."""
    rest: Mapping[str, float]
    """Shares of the other phases, which are not measured in pauses."""

    @classmethod
    def of(cls, phases: Mapping[str, float], exposed_in_backward: float, steps: int) -> UsualStep:
        """`phases`: the seconds of a window in each of them."""
        spent = {name: max(0.0, phases[name]) for name in PHASES if name not in OUTSIDE}
        backward = spent["backward"] + exposed_in_backward
        total = sum(spent.values())
        rest = {name: value for name, value in spent.items() if name not in MEASURED}
        rest["exchange"] = max(0.0, rest["exchange"] - exposed_in_backward)
        divisor = sum(rest.values())
        return cls(
            total / steps,
            backward / steps,
            exposed_in_backward / backward if backward else 0.0,
            {name: value / divisor for name, value in rest.items()} if divisor else {"other": 1.0},
        )

    def divide(self, clock: PhaseClock, seconds: float, noted: Noted, waited: float) -> None:
        """Divide `seconds` of phase other; `waited` of the backward passes was not usual."""
        backward = noted.backward_seconds - waited
        exchange = self.exchange_share * backward
        rest = seconds - noted.input_seconds - noted.backward_seconds
        clock.move("other", "input", noted.input_seconds)
        clock.move("other", "backward", backward - exchange)
        clock.move("other", "exchange", exchange)
        clock.move("other", "wait", waited)
        for phase, share in self.rest.items():
            clock.move("other", phase, share * rest)
