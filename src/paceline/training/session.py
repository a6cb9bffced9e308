"""Data-parallel training in a user's own loop: synchronization, measurement and records.

`paceline.join` (launch/join.py) connects the workers and returns a `Session` to each of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.errors import RunError, UsageError
from paceline.measure.gradient_noise import GradientNoise
from paceline.measure.phase_clock import PhaseClock, clock_for
from paceline.measure.tensorboard import TensorBoardWriter
from paceline.records import EventWriter, RunFolder
from paceline.strategies.replica import Replica, synchronize_buffers
from paceline.strategies.strategy import StepMeter, Strategy
from paceline.training.batches import Batches, Samples, open_batches, shard_warning
from paceline.training.coordination import StepCoordinator, noise_meter
from paceline.training.display import SilentDisplay
from paceline.training.rank_report import RankReport, account_of, final_weights_sha256
from paceline.training.run_logger import RunLogger
from paceline.training.steady import SteadyPhases

logger = logging.getLogger("paceline")


class Session:
    """One worker of a user's own training loop."""

    def __init__(
        self,
        config: RunConfig,
        rank_info: RankInfo,
        communicator: Communicator,
        strategy: Strategy,
        device: torch.device,
    ) -> None:
        self.rank = rank_info.rank
        self.world_size = rank_info.world_size
        self.is_first = rank_info.rank == 0
        """Whether this is rank 0, for work that only one worker should do, such as saving."""
        self.communicator = communicator
        self.device = device
        """The device of this worker; `prepare` moves the model to it, and batches are on it."""
        self.folder: RunFolder | None = None
        """Where `prepare` opens the records of this worker; None: nothing is recorded."""
        self.warnings: list[str] = []
        self._config = config
        self._rank_info = rank_info
        self._strategy = strategy
        self._clock = clock_for(device, PhaseClock())
        self._replica: Replica | None = None
        self._logger: RunLogger | None = None
        self._iterations = 0
        self._samples: int | None = 0
        self._loss: Tensor | None = None
        self._history: list[dict[str, Any]] = []

    @property
    def path(self) -> Path | None:
        """The run folder; None if nothing is recorded."""
        return None if self.folder is None else self.folder.path

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Samples | Iterable[Any],
        *,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> tuple[nn.Module, Optimizer, Batches]:
        """Start all workers from rank 0's weights; use the returned objects. Collective.

        `data` is a dataset, of which each worker gets a shard of each global batch of `batch_size`
        samples; or, without `batch_size`, a DataLoader or another iterable of this worker's own
        batches.
        """
        if self._replica is not None:
            raise UsageError("team.prepare: can be called only once; join again for another model")
        model = model.to(self.device)
        replica = Replica(
            model=model,
            optimizer=optimizer,
            clock=self._clock,
            forward=model,
            scaler=torch.amp.GradScaler(self.device.type, enabled=False),
            communicator=self.communicator,
            node=self._rank_info.node_rank,
        )
        self._batches = open_batches(replica, data, batch_size, seed, self.device)
        self._replica = replica
        self._strategy.setup(replica)
        replica.noise = noise_meter(self._config, self._strategy)
        self._meter = self._strategy.meter or StepMeter()
        self._coordinator = StepCoordinator(self._config, self._strategy, replica)
        self._coordinator.start()
        self._steady = SteadyPhases(self._clock, replica)
        if self.folder is not None:
            self._logger = self._open_logger(self.folder)
        if self.is_first and (text := shard_warning(data, self.world_size)):
            self._warn(text)
        self._began = self._clock.wall_seconds
        trained = model if replica.forward is model else _Wrapped(model, replica.forward)
        # Before hooks of the strategy, which are part of the forward pass.
        self._hook = trained.register_forward_pre_hook(_ForwardStart(self._batches), prepend=True)
        return trained, replica.optimizer, self._batches

    def _open_logger(self, folder: RunFolder) -> RunLogger:
        opened = RunLogger(
            EventWriter(folder.events_file(self.rank)),
            TensorBoardWriter(folder.tensorboard) if self.is_first else None,
            SilentDisplay(),
            total_iterations=0,
            clock=self._clock,
            coordinator=self._coordinator,
            strategy=self._strategy,
            fails_on_divergence=False,
        )
        opened.events.write("start", iteration=0, resumed=False, workers=self.world_size)
        opened.begin()
        return opened

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of this worker's mean loss; call it once per batch.

        The loss is weighted by this worker's fraction of the global batch, so that the sum of all
        gradients is the gradient of the mean over the global batch. It is recorded.
        """
        if self._replica is None:
            raise UsageError("team.backward: call team.prepare first")
        self._loss = loss.detach()
        self._batches.end_forward()
        self._batches.weigh()
        self._begin_measurement(self._replica.noise)
        self._clock.enter("backward")
        self._strategy.backward(loss * self._replica.batch_fraction)
        self._clock.enter("other")

    def _begin_measurement(self, noise: GradientNoise) -> None:
        own, whole = self._batches.own_samples, self._batches.global_samples
        if whole is None:
            noise.disable("the numbers of samples are not known")
        noise.begin_step(self._iterations, own or 0, whole or 0)

    def step(self) -> None:
        """Synchronize and update the weights; replaces `step` and `zero_grad` of the optimizer."""
        if self._replica is None:
            raise UsageError("team.step: call team.prepare first")
        # As in a profile, what follows the backward pass, such as clipping, is part of the update.
        if self._clock.phase == "other":
            self._clock.phase = "update"
        noise = self._replica.noise
        if noise.wants_own and not self._strategy.reports_own_gradients:
            noise.add_own(self._replica.gradients())
        self._strategy.step()
        if noise.is_measuring:
            noise.end_step()
        batches = self._batches
        ended = self._clock.end_step("other")
        samples = batches.own_samples
        self._iterations += 1
        if samples is None or self._samples is None:
            self._samples = None
        else:
            self._samples += samples
        if self._logger is not None and self._loss is not None:
            rate = float(self._replica.optimizer.param_groups[0]["lr"])
            index, loss = self._iterations - 1, self._loss
            self._log(lambda log: log.iteration(index, loss, samples or 0, rate, ended))
        self._loss = None
        self._coordinator.after_step(ended - batches.began, samples or 0, stop=False)
        self._steady.first_done(self._meter.settle)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate the model in this block: in eval mode, without gradients. Collective.

        The model holds the weights to evaluate, and the time counts as evaluation.
        """
        if self._replica is None:
            raise UsageError("team.evaluating: call team.prepare first")
        model = self._replica.model
        was_training = model.training
        self._meter.settle()
        with (
            self._steady.outside(),
            self._clock.during("evaluate"),
            self._strategy.eval_weights(),
            torch.no_grad(),
        ):
            synchronize_buffers(model, self.communicator, self._config.buffers)
            model.eval()
            try:
                yield
            finally:
                model.train(was_training)

    def log(
        self,
        *,
        test_loss: float | Tensor | None = None,
        test_accuracy: float | Tensor | None = None,
        **metrics: float | Tensor,
    ) -> None:
        """Record the results of an evaluation; only those of rank 0 are recorded."""
        if self._replica is None:
            raise UsageError("team.log: call team.prepare first")
        if self._logger is None or not self.is_first:
            return
        values = {name: float(value) for name, value in metrics.items()}
        if test_accuracy is not None:
            values = {"accuracy": float(test_accuracy), **values}
        now = self._clock.enter(self._clock.phase) - self._clock.started
        seconds = now - self._began - self._clock.known_seconds["evaluate"]
        self._log(lambda log: log.flush())
        entry: dict[str, Any] = {
            "iteration": self._iterations,
            "epoch": self._batches.epochs_done,
            "seconds": seconds,
            "test_loss": None if test_loss is None else float(test_loss),
            "test_accuracy": values.get("accuracy"),
            "metrics": values,
            "train_loss": self._logger.train_loss,
            "learning_rate": float(self._replica.optimizer.param_groups[0]["lr"]),
        }
        self._history.append(entry)
        shown = {
            "rank": self.rank,
            "wall_seconds": now,
            "samples_per_second": (self._samples or 0) / max(seconds, 1e-9),
        }
        self._log(lambda log: log.evaluation({**entry, **shown}))

    def _log(self, write: Callable[[RunLogger], None]) -> None:
        """Write records; a full disk ends the records, not the training."""
        if self._logger is None:
            return
        try:
            write(self._logger)
        except RunError as error:
            with contextlib.suppress(RunError):
                self._logger.close()
            self._logger = None
            self._warn(f"the records of rank {self.rank} end early: {error}")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        logger.warning("%s", text)

    def finish(self) -> None:
        """Leave the final weights on every worker; `join` calls it at the end. Collective."""
        if self._replica is None:
            return
        self._hook.remove()
        self._log(lambda log: log.flush())
        # A loop that left its last batch unused has not waited for its weight.
        self._batches.weigh()
        self._meter.settle()
        self._coordinator.settle()
        self._log(lambda log: log.noise())
        self._steady.end()
        with self._clock.during("exchange"):
            self._strategy.synchronize()
            self._strategy.finish()
            synchronize_buffers(self._replica.model, self.communicator, self._config.buffers)

    def account(self) -> dict[str, Any]:
        """Return time by phase and traffic of this worker, as in `workers` of result.json.

        Waiting is separated from communication about once per second, and at the end.
        """
        if self._replica is None:
            raise UsageError("team.account: call team.prepare first")
        self._clock.enter("other")
        phases = dict(self._clock.seconds)
        step_seconds = self._clock.step_seconds
        return account_of(
            self._rank_info,
            self._samples,
            phases,
            step_seconds,
            self._replica,
            self._strategy,
            self._steady,
        )

    def report(self, status: str, cause: str | None, exit_code: int) -> RankReport | None:
        """Close the records and return the report of this rank; None if it never prepared."""
        if self._replica is None or self.folder is None:
            return None
        self._log(lambda log: log.flush())
        # A disk may be full, and the result must still be written.
        self._log(lambda log: log.events.write("end", status=status, cause=cause))
        measuring, train_loss = self._clock.measuring_seconds(), None
        if self._logger is not None:
            measuring, train_loss = measuring + self._logger.seconds_spent, self._logger.train_loss
            self._log(lambda log: log.close())
        account = self.account()
        if self.is_first:
            account["noise_scale"] = self._replica.noise.summary()
        return RankReport(
            status=status,
            cause=cause,
            exit_code=exit_code,
            is_secondary=False,
            ended=time.time(),
            is_together=status == "finished",
            iterations=self._iterations,
            weights_sha256=final_weights_sha256(self._replica, self._strategy),
            train_loss=train_loss,
            seconds_to_target=None,
            history=self._history,
            worker=account,
            checkpoints={"count": 0, "bytes": 0, "blocked_seconds": 0.0},
            measuring_fraction=measuring / max(self._clock.wall_seconds, 1e-9),
            warnings=self.warnings,
        )


class _ForwardStart:
    """A hook by which batches learn that the model is called; a copy of the model has none."""

    def __init__(self, batches: Batches | None = None) -> None:
        self._batches = batches

    def __call__(self, *_: object) -> None:
        # Compiled code must not depend on the clock.
        if not torch.compiler.is_compiling() and self._batches is not None:
            self._batches.begin_forward()

    def __reduce__(self) -> tuple[type[_ForwardStart], tuple[()]]:
        return _ForwardStart, ()


class _Wrapped(nn.Module):
    """The user's model, called through the wrapper of the strategy."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call = forward

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._call(*inputs, **named)
