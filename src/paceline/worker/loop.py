"""The training loop of one worker: batches, forward, backward, update, and what comes between."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from paceline.config import Every, RunConfig
from paceline.data.input import InputPath
from paceline.errors import DivergedError, StoppedError
from paceline.sync.replica import Replica
from paceline.sync.strategy import Strategy
from paceline.worker.evaluate import evaluate
from paceline.worker.journal import Journal
from paceline.worker.optimiser import set_learning_rate
from paceline.worker.schedule import learning_rate

Batch = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Progress:
    """How far a run has come; what a checkpoint holds besides tensors."""

    iteration: int = 0
    samples: int = 0
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
        inputs: InputPath,
        test_batches: Callable[[], Iterable[Batch]],
        journal: Journal,
        autocast: AbstractContextManager[Any],
        progress: Progress,
        checkpoint: Callable[[], None] | None = None,
        rank: int = 0,
    ) -> None:
        self.config = config
        self.replica = replica
        self.strategy = strategy
        self.progress = progress
        self.iteration_seconds = array("d")
        self.stop_requested: str | None = None
        """Set from a signal handler: why the loop should end after the iteration at hand."""
        self._inputs = inputs
        self._test_batches = test_batches
        self._journal = journal
        self._autocast = autocast
        self._checkpoint = checkpoint
        self._rank = rank
        self._clock = replica.clock
        self._per_epoch = inputs.order.batches_per_epoch
        self._rate_at = learning_rate(config, self._per_epoch)
        self._total = config.iterations_in_total(self._per_epoch)
        self._rate = 0.0

    def run(self) -> None:
        """Train to the end of the budget, to the target accuracy, or until asked to stop."""
        progress, clock = self.progress, self._clock
        self._begun = clock.enter("other") - progress.trained_seconds
        self._evaluated_before = clock.seconds["evaluate"]
        self.replica.model.train()
        while progress.iteration < self._total and progress.seconds_to_target is None:
            begin = clock.enter("input")
            loss, samples = self._iterate(progress.iteration)
            end = clock.enter("other")
            self.iteration_seconds.append(end - begin)
            self._journal.iteration(progress.iteration, end - begin, loss, samples, self._rate, end)
            progress.iteration += 1
            progress.samples += samples
            self._between_iterations()
        self._journal.flush()
        self.strategy.finish()

    def _iterate(self, iteration: int) -> tuple[Tensor, int]:
        """One update; returns the batch's loss and its number of samples."""
        epoch, index = divmod(iteration, self._per_epoch)
        inputs, labels = self._inputs.batch(epoch, index)
        self._rate = self._rate_at(iteration)
        set_learning_rate(self.replica.optimizer, self._rate)
        count = len(labels)
        parts = min(self.config.accumulate, count)
        if parts == 1:
            loss = self._part(inputs, labels)
        else:
            loss = self._in_parts(inputs.chunk(parts), labels.chunk(parts), count)
        self.strategy.step()
        return loss, count

    def _in_parts(
        self, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...], count: int
    ) -> Tensor:
        """The batch part by part; each weighs as many samples as it has, so the sum is exact."""
        total: Tensor | None = None
        for number, (part, targets) in enumerate(zip(inputs, labels, strict=True), 1):
            self.replica.last_part = number == len(inputs)
            self._clock.enter("input")
            loss = self._part(part, targets, len(targets) / count)
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _part(self, inputs: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
        self._clock.enter("forward")
        with self._autocast:
            loss = F.cross_entropy(
                self.replica.forward(inputs), labels, label_smoothing=self.config.label_smoothing
            )
        if weight != 1.0:
            loss = loss * weight
        self._clock.enter("backward")
        self.strategy.backward(loss)
        return loss.detach()

    def _between_iterations(self) -> None:
        done, at_end = self.progress.iteration, self.progress.iteration == self._total
        if at_end or self._is_due(self.config.eval_every, done):
            self._evaluate()
        if self._checkpoint and self._is_due(self.config.checkpoint_every, done):
            self.checkpoint()
        if self.stop_requested and not at_end:
            self._journal.flush()
            if self._checkpoint:
                self.checkpoint()
            raise StoppedError(f"{self.stop_requested} after iteration {done}")

    def _is_due(self, every: Every, done: int) -> bool:
        if every == "never":
            return False
        return done % (self._per_epoch if every == "epoch" else every) == 0

    def _evaluate(self) -> None:
        # A diverged model is not worth evaluating, and the losses so far belong before the entry.
        self._journal.flush()
        trained_seconds = self._trained_seconds()
        with self._clock.during("evaluate"), self._autocast:
            loss, accuracy = evaluate(
                self.replica.model, self.replica.forward, self._test_batches()
            )
        if not math.isfinite(loss):
            raise DivergedError(
                f"the test loss became {loss} at iteration {self.progress.iteration}:"
                " try a lower --lr, some --warmup-epochs or --clip-norm"
            )
        entry = {
            "iteration": self.progress.iteration,
            "epoch": self.progress.iteration / self._per_epoch,
            "seconds": trained_seconds,
            "test_loss": loss,
            "test_accuracy": accuracy,
            "train_loss": self._journal.train_loss,
            "learning_rate": self._rate,
        }
        self.progress.history.append(entry)
        shown = {
            "rank": self._rank,
            "wall_seconds": self._clock.wall_seconds,
            "samples_per_second": self.progress.samples / trained_seconds,
        }
        self._journal.evaluation({**entry, **shown})
        target = self.config.target_accuracy
        if target is not None and accuracy >= target:
            self.progress.seconds_to_target = trained_seconds

    def _trained_seconds(self) -> float:
        now = self._clock.enter("other")
        return now - self._begun - (self._clock.seconds["evaluate"] - self._evaluated_before)

    def checkpoint(self) -> None:
        """Write a checkpoint now; never one of a model that has diverged already."""
        assert self._checkpoint is not None
        self._journal.flush()
        self.progress.trained_seconds = self._trained_seconds()
        with self._clock.during("checkpoint"):
            self._checkpoint()
