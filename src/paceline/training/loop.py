"""The training loop of one rank: steps, and between them evaluation, checkpoints and stops."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from paceline.config import Every, RunConfig
from paceline.errors import AgreedStopError, DivergedError
from paceline.measure.trace import Tracer
from paceline.strategies.strategy import (
    Assignment,
    AssignmentRequest,
    ServerStrategy,
    StepMeter,
)
from paceline.training.coordination import StepCoordinator
from paceline.training.rank_report import RunTotals
from paceline.training.run_logger import RunLogger
from paceline.training.run_state import Progress
from paceline.training.steady import SteadyPhases
from paceline.training.step import TrainStep

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Asks the loop to stop after the current step."""

    def __init__(self) -> None:
        self.cause: str | None = None
        """Why to stop; None while nothing asks for it."""

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Stop on SIGINT and SIGTERM; a second SIGINT raises KeyboardInterrupt at once.

        A second SIGTERM has no effect: SLURM sends two at a job's time limit.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def receive(number: int, frame: FrameType | None) -> None:
            if self.cause is None:
                self.cause = f"stopped by {signal.Signals(number).name}"
            elif number == signal.SIGINT:
                raise KeyboardInterrupt

        before = [signal.signal(number, receive) for number in SIGNALS]
        try:
            yield
        finally:
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)


class TrainingLoop:
    def __init__(
        self,
        config: RunConfig,
        progress: Progress,
        totals: RunTotals,
        step: TrainStep,
        evaluate: Callable[[bool], tuple[float, dict[str, float | None]]],
        logger: RunLogger,
        coordinator: StepCoordinator,
        stop: StopRequest,
        save_checkpoint: Callable[[], None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`evaluate(alone)` returns test loss and metrics, computed by one rank or by all."""
        self.progress = progress
        self._totals = totals
        self._step = step
        self._evaluate_model = evaluate
        self._logger = logger
        self._coordinator = coordinator
        self._stop_request = stop
        self._save_checkpoint = save_checkpoint
        self._tracer = tracer
        self._strategy = strategy = step.strategy
        self._meter = strategy.meter or StepMeter()
        self._clock = step.replica.clock
        self._rank = step.replica.communicator.rank
        self._per_epoch = step.batches_per_epoch
        self._total = config.iterations_in_total(self._per_epoch)
        self._eval_every = _cadence(config.eval_every, self._per_epoch)
        self._checkpoint_every = 0
        if save_checkpoint is not None:
            self._checkpoint_every = _cadence(config.checkpoint_every, self._per_epoch)
        self._target = config.target
        self._iteration_before = progress.iteration
        self._samples_before = progress.samples
        self._trained_before = progress.trained_seconds
        self._assignments: _InOrder | _FromServers
        if isinstance(strategy, ServerStrategy) and not strategy.synchronous:
            self._assignments = _FromServers(
                progress, self._total, strategy, self._checkpoint_every, stop, totals.steady
            )
        else:
            self._assignments = _InOrder(progress, self._total, self._rank, totals.steady)

    def run(self) -> None:
        """Train until the iterations are done, the target accuracy is reached or a stop is due."""
        progress, clock = self.progress, self._clock
        self._began = clock.enter("other") - progress.trained_seconds
        self._evaluated_before = clock.seconds["evaluate"]
        self._logger.begin()
        self._step.replica.model.train()
        while True:
            if self._tracer is not None:
                self._tracer.before_iteration(progress.steps)
            began = clock.begin_step("input")
            assignment = self._assignments.next()
            if assignment is None:
                break
            if assignment.action != "train":
                self._meet(assignment)
                began = clock.begin_step("input")
            loss, samples = self._step(assignment.iteration, assignment.part)
            ended = clock.end_step("other")
            self._iteration_before = progress.iteration
            progress.iteration = assignment.iteration + 1
            progress.steps += 1
            progress.samples += samples
            # Last, because it raises for a loss that is not finite, and the step counts even then.
            self._logger.iteration(
                progress.steps - 1, loss, samples, self._step.learning_rate, ended
            )
            if progress.iteration < self._total:
                self._between_steps(ended - began, samples)
                self._totals.steady.first_done(self._meter.settle)
        self._finish()

    def _meet(self, assignment: Assignment) -> None:
        """Stop, or write a checkpoint, where parameter servers call all ranks together."""
        if assignment.action == "stop":
            self._stop()
        self._clock.enter("other")
        self._totals.steady.leave_out()
        self._checkpoint()

    def _between_steps(self, seconds: float, samples: int) -> None:
        if self._is_due(self._eval_every):
            self._evaluate(alone=self._assignments.is_asynchronous)
        if not self._assignments.is_asynchronous and self._is_due(self._checkpoint_every):
            self._checkpoint()
        if self._coordinator.after_step(
            seconds, samples, stop=self._stop_request.cause is not None
        ):
            self._stop()

    def _finish(self) -> None:
        self._logger.flush()
        self._meter.settle()
        self._coordinator.settle()
        self._logger.noise()
        self._assignments.end()
        # Before workers with a shard of the weights gather all of them.
        self._step.memory.steps_done()
        with self._clock.during("exchange"):
            self._strategy.synchronize()
            self._strategy.finish()
        self._iteration_before = self.progress.iteration - 1
        history = self.progress.history
        is_evaluated = history and history[-1]["iteration"] == self.progress.iteration
        if not (is_evaluated and self._strategy.replicas_equal):
            self._evaluate(alone=False)
        if self._is_due(self._checkpoint_every):
            self._checkpoint()

    def _stop(self) -> None:
        """Raise AgreedStopError, as all other ranks do after this iteration."""
        self._logger.flush()
        if self._save_checkpoint is not None:
            self._checkpoint()
        cause = self._stop_request.cause
        error = AgreedStopError(
            f"{cause or 'stopped by another worker'} after iteration {self.progress.iteration}"
        )
        error.is_secondary = cause is None
        raise error

    def _is_due(self, every: int) -> bool:
        """Return whether the last step reached or passed a multiple of `every` iterations."""
        return every > 0 and self.progress.iteration // every > self._iteration_before // every

    def _evaluate(self, alone: bool) -> None:
        """Evaluate on all ranks, each with a shard of the test set, or on rank 0 alone."""
        # A diverged model is not worth evaluating, and its losses belong before the evaluation.
        self._logger.flush()
        if alone and self._rank:
            return
        self._meter.settle()
        trained_seconds = self._trained_seconds()
        with self._totals.steady.outside(), self._clock.during("evaluate"):
            self._step.memory.steps_done()
            loss, metrics = self._evaluate_model(alone)
        if not math.isfinite(loss):
            raise DivergedError(
                f"the test loss became {loss} at iteration {self.progress.iteration}:"
                " try a lower --lr, some --warmup-epochs or --clip-norm"
            )
        self._record_evaluation(loss, metrics, trained_seconds)

    def _record_evaluation(
        self, loss: float, metrics: Mapping[str, float | None], trained_seconds: float
    ) -> None:
        progress = self.progress
        entry: dict[str, Any] = {
            "iteration": progress.iteration,
            "epoch": progress.iteration / self._per_epoch,
            "seconds": trained_seconds,
            "test_loss": loss,
            "test_accuracy": metrics.get("accuracy"),
            "metrics": dict(metrics),
            "train_loss": self._logger.train_loss,
            "learning_rate": self._step.learning_rate,
        }
        progress.history.append(entry)
        # Only of this process: before a resume the number of workers may have been another.
        samples = progress.samples - self._samples_before
        seconds = trained_seconds - self._trained_before
        shown = {
            "rank": self._rank,
            "wall_seconds": self._totals.seconds_before + self._clock.wall_seconds,
            "samples_per_second": samples / max(seconds, 1e-9),
        }
        self._logger.evaluation({**entry, **shown})
        target = self._target
        if target and target.is_reached(entry[target.key]) and progress.seconds_to_target is None:
            progress.seconds_to_target = trained_seconds

    def _checkpoint(self) -> None:
        """Write a checkpoint, unless the model has diverged."""
        assert self._save_checkpoint is not None
        self._logger.flush()
        self._meter.settle()
        self.progress.trained_seconds = self._trained_seconds()
        with self._totals.steady.outside(), self._clock.during("checkpoint"):
            # Failed communication leaves wrong weights on a GPU.
            self._strategy.synchronize()
            self._save_checkpoint()

    def _trained_seconds(self) -> float:
        now = self._clock.enter("other")
        return now - self._began - (self._clock.seconds["evaluate"] - self._evaluated_before)


class _InOrder:
    """Assignments of synchronous training: every rank trains on its shard of the next batch."""

    is_asynchronous = False

    def __init__(self, progress: Progress, total: int, rank: int, steady: SteadyPhases) -> None:
        self._progress = progress
        self._total = total
        self._rank = rank
        self._steady = steady

    def next(self) -> Assignment | None:
        """Return None at the end of training."""
        progress = self._progress
        if progress.seconds_to_target is not None or progress.iteration >= self._total:
            return None
        return Assignment(progress.iteration, self._rank)

    def end(self) -> None:
        """End the steady phases after the last step."""
        self._steady.end()


class _FromServers:
    """Assignments of asynchronous training: parameter servers give shards to ranks on request.

    The servers also decide for all ranks when to checkpoint or stop, because only one rank may
    know that a stop was requested or that the target is reached.
    """

    is_asynchronous = True

    def __init__(
        self,
        progress: Progress,
        total: int,
        strategy: ServerStrategy,
        checkpoint_every: int,
        stop: StopRequest,
        steady: SteadyPhases,
    ) -> None:
        self._progress = progress
        self._first = progress.iteration
        self._total = total
        self._strategy = strategy
        self._checkpoint_every = checkpoint_every
        self._stop = stop
        self._steady = steady

    def next(self) -> Assignment | None:
        # A request that finds no work left is not part of a step.
        self._steady.end()
        progress = self._progress
        assignment = self._strategy.next_assignment(
            AssignmentRequest(
                self._first,
                self._total,
                self._checkpoint_every,
                stop=self._stop.cause is not None,
                finish=progress.seconds_to_target is not None,
            )
        )
        if assignment.action != "train":
            progress.iteration = assignment.iteration
        return None if assignment.action == "end" else assignment

    def end(self) -> None:
        """Do nothing: the last request ended the steady phases."""


def _cadence(every: Every, batches_per_epoch: int) -> int:
    """Convert to iterations; 0 means never."""
    if every == "never":
        return 0
    return batches_per_epoch if every == "epoch" else every
