"""The training loop of one worker: batches, forward, backward, update, and what comes between."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.config import Every, RunConfig
from paceline.data.pipeline import InputPipeline
from paceline.errors import AgreedStopError, DivergedError
from paceline.measure.trace import Tracer
from paceline.strategies.replica import Replica, agree_on_buffers
from paceline.strategies.strategy import (
    Assignment,
    AssignmentRequest,
    ServerStrategy,
    Strategy,
)
from paceline.training.coordination import StepCoordinator
from paceline.training.evaluation import evaluate
from paceline.training.run_logger import RunLogger
from paceline.training.steady import SteadyPhases
from paceline.training.step import TrainStep

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Progress:
    """How far a run has come; what a checkpoint holds besides tensors."""

    iteration: int = 0
    steps: int = 0
    """That this worker has done: as many, except where batches are dealt to whoever is free."""
    samples: int = 0
    """That this worker has trained on."""
    samples_before: int = 0
    """That all workers together had trained on when their number changed last."""
    steps_before: int = 0
    """That this worker had done then."""
    trained_seconds: float = 0.0
    """Since the first iteration began, evaluation left out; a resumed run's earlier parts count."""
    seconds_to_target: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


class TrainingLoop:
    def __init__(
        self,
        config: RunConfig,
        replica: Replica,
        strategy: Strategy,
        inputs: InputPipeline,
        test_batches: Callable[[bool], Iterable[Batch]],
        journal: RunLogger,
        autocast: AbstractContextManager[Any],
        progress: Progress,
        checkpoint: Callable[[], None] | None = None,
        tracer: Tracer | None = None,
        seconds_before: float = 0.0,
        steady: SteadyPhases | None = None,
    ) -> None:
        """`test_batches(alone)` gives this worker's part of the test set, or all of it.

        `seconds_before`: wall time of a resumed run's earlier parts.
        """
        self.config = config
        self.replica = replica
        self.strategy = strategy
        self.progress = progress
        self.stop_requested: str | None = None
        """Set from a signal handler: why the loop should end soon."""
        self._test_batches = test_batches
        self._journal = journal
        self._autocast = autocast
        self._checkpoint = checkpoint
        self._tracer = tracer
        self._seconds_before = seconds_before
        self._steady = steady or SteadyPhases(replica.clock, replica)
        self._samples_before = progress.samples
        self._trained_before = progress.trained_seconds
        self._clock = replica.clock
        self._per_epoch = inputs.order.batches_per_epoch
        self._total = config.iterations_in_total(self._per_epoch)
        self._rank = replica.communicator.rank
        self._first = self._iteration_before = progress.iteration
        if strategy.meter is not None:
            journal.notes = strategy.meter.take
        journal.take_iteration_seconds = replica.clock.take_laps
        journal.phase_seconds = lambda: replica.clock.seconds
        self._coordinator = StepCoordinator(config, strategy, replica)
        self._step = TrainStep(config, replica, strategy, inputs, self._coordinator, autocast)
        journal.settled_phase_seconds = lambda: self._coordinator.settled_phase_seconds

    def run(self) -> None:
        """Train to the end of the budget, to the target accuracy, or until asked to stop."""
        progress, clock = self.progress, self._clock
        self._begun = clock.enter("other") - progress.trained_seconds
        self._evaluated_before = clock.seconds["evaluate"]
        self._coordinator.begin()
        self._journal.begin()
        self.replica.model.train()
        while True:
            if self._tracer is not None:
                self._tracer.before_iteration(progress.steps)
            begin = clock.begin_step("input")
            if not self.strategy.synchronous:
                # The claim that finds nothing left is no part of an iteration.
                self._steady.end()
            turn = self._next_turn()
            if turn is None:
                break
            if turn.action == "checkpoint":
                clock.enter("other")
                self._steady.leave_out()
                self.checkpoint()
                begin = clock.begin_step("input")
            loss, samples = self._step(turn.iteration, turn.part)
            end = clock.end_step("other")
            self._iteration_before = progress.iteration
            progress.iteration = turn.iteration + 1
            progress.steps += 1
            progress.samples += samples
            # Last, because it raises when the loss is not finite: this iteration counts even then.
            self._journal.iteration(
                progress.steps - 1, loss, samples, self._step.learning_rate, end
            )
            if progress.iteration < self._total:
                self._between_iterations(end - begin, samples)
                self._steady.first_done(self._settle_meter)
        self._finish()

    def clock_offset_seconds(self, moment: float) -> float:
        """What to add to a moment of this worker's clock to get the first worker's."""
        return self._coordinator.clock_offset.at(moment)

    def _settle_meter(self) -> None:
        if self.strategy.meter is not None:
            self.strategy.meter.settle()

    def _next_turn(self) -> Assignment | None:
        """None: there is nothing left to do."""
        progress = self.progress
        is_at_target = progress.seconds_to_target is not None
        if self.strategy.synchronous:
            is_over = is_at_target or progress.iteration >= self._total
            return None if is_over else Assignment(progress.iteration, self._rank)
        # Rank 0 alone may know that the target is reached: all workers are told in their claims.
        stop = self.stop_requested is not None
        checkpoint_every = self._cadence(self.config.checkpoint_every) if self._checkpoint else 0
        terms = AssignmentRequest(
            self._first, self._total, checkpoint_every, stop, finish=is_at_target
        )
        assert isinstance(self.strategy, ServerStrategy)
        turn = self.strategy.next_assignment(terms)
        if turn.action != "train":
            progress.iteration = turn.iteration
        if turn.action == "stop":
            self._stop()
        return turn if turn.action in ("train", "checkpoint") else None

    def _finish(self) -> None:
        self._journal.flush()
        self._settle_meter()
        self._coordinator.settle()
        if self.strategy.synchronous:
            self._steady.end()
        with self._clock.during("exchange"):
            self.strategy.finish()
        self._iteration_before = self.progress.iteration - 1
        history = self.progress.history
        is_evaluated = history and history[-1]["iteration"] == self.progress.iteration
        if not (is_evaluated and self.strategy.replicas_equal):
            self._evaluate(alone=False)
        if self._checkpoint and self._is_due(self.config.checkpoint_every):
            self.checkpoint()

    def _between_iterations(self, seconds: float, samples: int) -> None:
        if self._is_due(self.config.eval_every):
            self._evaluate(alone=not self.strategy.synchronous)
        if (
            self._checkpoint
            and self.strategy.synchronous
            and self._is_due(self.config.checkpoint_every)
        ):
            self.checkpoint()
        if self._coordinator.after_step(seconds, samples, self.stop_requested is not None):
            self._stop()

    def _stop(self) -> None:
        """End here, as all workers do."""
        self._journal.flush()
        if self._checkpoint:
            self.checkpoint()
        cause = self.stop_requested or "stopped by another worker"
        error = AgreedStopError(f"{cause} after iteration {self.progress.iteration}")
        error.is_secondary = self.stop_requested is None
        raise error

    def _is_due(self, every: Every) -> bool:
        """Whether the last turn has completed a multiple of the cadence; out of lockstep it may
        have gone beyond it."""
        cadence = self._cadence(every)
        if not cadence:
            return False
        return self.progress.iteration // cadence > self._iteration_before // cadence

    def _cadence(self, every: Every) -> int:
        """In iterations; 0 is never."""
        if every == "never":
            return 0
        return self._per_epoch if every == "epoch" else every

    def _evaluate(self, alone: bool) -> None:
        """On the whole test set: each worker a part of it, or, out of lockstep, the first alone."""
        # A diverged model is not worth evaluating, and the losses so far belong before the entry.
        self._journal.flush()
        if alone and self._rank:
            return
        self._settle_meter()
        trained_seconds = self._trained_seconds()
        together = None if alone else self.replica.communicator
        with (
            self._steady.outside(),
            self._clock.during("evaluate"),
            self._autocast,
            self.strategy.eval_weights(),
        ):
            if together is not None:
                agree_on_buffers(self.replica.model, together, self.config.buffers)
            loss, accuracy = evaluate(
                self.replica.model, self.replica.forward, self._test_batches(alone), together
            )
        if not math.isfinite(loss):
            raise DivergedError(
                f"the test loss became {loss} at iteration {self.progress.iteration}:"
                " try a lower --lr, some --warmup-epochs or --clip-norm"
            )
        self._note_evaluation(loss, accuracy, trained_seconds)

    def _note_evaluation(self, loss: float, accuracy: float, trained_seconds: float) -> None:
        entry = {
            "iteration": self.progress.iteration,
            "epoch": self.progress.iteration / self._per_epoch,
            "seconds": trained_seconds,
            "test_loss": loss,
            "test_accuracy": accuracy,
            "train_loss": self._journal.train_loss,
            "learning_rate": self._step.learning_rate,
        }
        self.progress.history.append(entry)
        shown = {
            "rank": self._rank,
            "wall_seconds": self._seconds_before + self._clock.wall_seconds,
            "samples_per_second": self._samples_per_second(trained_seconds),
        }
        self._journal.evaluation({**entry, **shown})
        target = self.config.target_accuracy
        if target is not None and accuracy >= target and self.progress.seconds_to_target is None:
            self.progress.seconds_to_target = trained_seconds

    def _samples_per_second(self, trained_seconds: float) -> float:
        """Since this process began: a resumed run may have had more or fewer workers before."""
        samples = self.progress.samples - self._samples_before
        return samples / max(trained_seconds - self._trained_before, 1e-9)

    def _trained_seconds(self) -> float:
        now = self._clock.enter("other")
        return now - self._begun - (self._clock.seconds["evaluate"] - self._evaluated_before)

    def checkpoint(self) -> None:
        """Write a checkpoint now; never one of a model that has diverged already."""
        assert self._checkpoint is not None
        self._journal.flush()
        self._settle_meter()
        self.progress.trained_seconds = self._trained_seconds()
        with self._steady.outside(), self._clock.during("checkpoint"):
            self._checkpoint()
