"""Logs steps and evaluations to the event file, TensorBoard and the display.

Logging a step is cheap; steps are written to disk in blocks.
"""

from __future__ import annotations

import math
from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from paceline.errors import DivergedError
from paceline.measure.loss_block import LossBlock
from paceline.measure.noise_scale import SAMPLE_KEYS
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.tensorboard import TensorBoardWriter
from paceline.records import EventWriter
from paceline.strategies.strategy import Strategy
from paceline.training.coordination import StepCoordinator
from paceline.training.display import Display, Status

BLOCK_SECONDS = 0.5
"""Interval between blocks: long enough to cost little, short enough for a live display."""
LOSSES_IN_MEAN = 100
"""`final.train_loss` is the mean over this many of the last iterations."""


class _Block(NamedTuple):
    """Steps that are written together."""

    first: int
    losses: LossBlock
    samples: int
    rate: float


class RunLogger:
    """Writes steps in blocks and evaluations immediately.

    Losses stay tensors, and times are not read, until the GPU has completed a block, so that
    neither a step nor the GPU waits for the log.
    """

    def __init__(
        self,
        events: EventWriter,
        tensorboard: TensorBoardWriter | None,
        display: Display,
        total_iterations: int,
        clock: PhaseClock,
        coordinator: StepCoordinator,
        strategy: Strategy,
        *,
        fails_on_divergence: bool = True,
    ) -> None:
        """`fails_on_divergence`: whether a loss that is not finite raises DivergedError."""
        self.events = events
        self.display = display
        self.seconds_spent = 0.0
        self._last_metrics: dict[str, float | None] = {}
        self.recent_losses: deque[float] = deque(maxlen=LOSSES_IN_MEAN)
        self._tensorboard = tensorboard
        self._total = total_iterations
        self._clock = clock
        self._coordinator = coordinator
        self._strategy = strategy
        self._fails_on_divergence = fails_on_divergence
        self._phases_before: dict[str, float] = {}
        """Seconds by phase when their fractions were last written."""
        self._losses: list[Tensor] = []
        self._samples = 0
        self._rate = 0.0
        self._first = 0
        self._block: _Block | None = None
        """Complete, but possibly not yet computed by the GPU."""
        self._written = perf_counter()

    def begin(self) -> None:
        """Call before the first step: earlier time belongs to no block."""
        self._phases_before = dict(self._coordinator.settled_phase_seconds)

    def iteration(self, index: int, loss: Tensor, samples: int, rate: float, now: float) -> None:
        """Add a step that ended at `now`; writes a block when one is due."""
        if not self._losses:
            self._first = index
        self._losses.append(loss)
        self._samples += samples
        self._rate = rate
        if self._block is not None:
            if self._block.losses.is_ready():
                self._write(self._block)
        elif now - self._written >= BLOCK_SECONDS:
            self._block = self._close_block()
            if self._block.losses.is_ready():
                self._write(self._block)

    def flush(self) -> None:
        """Write all steps; raises DivergedError if a loss is not finite."""
        if self._block is not None:
            self._write(self._block)
        if self._losses:
            self._write(self._close_block())

    def _close_block(self) -> _Block:
        block = _Block(self._first, LossBlock(self._losses), self._samples, self._rate)
        self._losses, self._samples = [], 0
        return block

    def _write(self, block: _Block) -> None:
        self._block = None
        # Waiting for the losses of a GPU is computation, not overhead of logging.
        losses = block.losses.values()
        begin = perf_counter()
        self._clock.settle_ready()
        seconds = self._clock.take_step_seconds(len(losses))
        self.recent_losses.extend(losses)
        self.events.write(
            "iterations",
            first=block.first,
            seconds=[round(value, 7) for value in seconds],
            loss=[_finite_or_none(value) for value in losses],
            learning_rate=block.rate,
            phases={name: round(spent, 4) for name, spent in self._clock.known_seconds.items()},
            **(self._strategy.meter.take() if self._strategy.meter else {}),
        )
        self._show(block, losses, sum(seconds))
        self.noise()
        if self._fails_on_divergence:
            _check_finite(block.first, losses)
        self._written = perf_counter()
        self.seconds_spent += self._written - begin

    def _show(self, block: _Block, losses: list[float], spent: float) -> None:
        done = block.first + len(losses)
        mean_loss = sum(losses) / len(losses)
        samples_per_second = block.samples / spent if spent else math.inf
        self.display.update(
            Status(
                iteration=done,
                iterations=self._total,
                loss=mean_loss,
                learning_rate=block.rate,
                samples_per_second=samples_per_second,
                metrics=self._last_metrics,
                seconds_left=(self._total - done) * spent / len(losses),
            )
        )
        if self._tensorboard:
            self._tensorboard.add("train/loss", mean_loss, done)
            self._tensorboard.add("train/learning_rate", block.rate, done)
            self._tensorboard.add("train/samples_per_second", samples_per_second, done)
            self._tensorboard.add("train/step_seconds", spent / len(losses), done)
            self._add_phase_fractions(self._tensorboard, done)

    def _add_phase_fractions(self, tensorboard: TensorBoardWriter, iteration: int) -> None:
        """Add each phase's fraction of the time since the last point; unused phases are skipped.

        Only uses times whose waits are attributed: moving time between phases later could give
        fractions below 0 or above 1.
        """
        phases, before = dict(self._coordinator.settled_phase_seconds), self._phases_before
        self._phases_before = phases
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in phases.items()}
        total = sum(spent.values())
        for name, seconds in spent.items():
            if total > 0 and phases[name]:
                tensorboard.add(f"phases/{name}", seconds / total, iteration)

    def noise(self) -> None:
        """Write the measured gradients that all ranks have combined since the last call."""
        noise = self._coordinator.noise
        samples, noise.unwritten = noise.unwritten, []
        if not samples:
            return
        values = {name: [getattr(each, name) for each in samples] for name in SAMPLE_KEYS}
        self.events.write("gradient_noise", **values)
        found = noise.estimate()
        if self._tensorboard and found is not None and found.value is not None:
            self._tensorboard.add("train/noise_scale", found.value, samples[-1].iteration + 1)

    def evaluation(self, entry: dict[str, Any]) -> None:
        self._last_metrics = entry["metrics"]
        self.events.write("evaluation", **entry)
        self.display.evaluation(entry)
        if self._tensorboard:
            for name, value in {"loss": entry["test_loss"], **entry["metrics"]}.items():
                if value is not None:
                    self._tensorboard.add(f"test/{name}", value, entry["iteration"])

    def warn(self, text: str) -> None:
        self.events.write("warning", text=text)
        self.display.say(f"warning: {text}")

    @property
    def train_loss(self) -> float | None:
        """Mean loss of the last iterations that were written; None if it is not finite."""
        return (
            _finite_or_none(sum(self.recent_losses) / len(self.recent_losses))
            if self.recent_losses
            else None
        )

    def close(self) -> None:
        """Close all outputs; warns if TensorBoard scalars could not be written."""
        if self._tensorboard and (problem := self._tensorboard.close()):
            self.warn(problem)
        self.display.close()
        self.events.close()


def _check_finite(first: int, losses: list[float]) -> None:
    for offset, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss} at iteration {first + offset}:"
                " try a lower --lr, some --warmup-epochs or --clip-norm"
            )


def _finite_or_none(value: float) -> float | None:
    # JSON has no NaN, and a strict reader would reject the whole line.
    return value if math.isfinite(value) else None
