"""One worker from its config to its account: build, perhaps resume, train, tell."""

from __future__ import annotations

import contextlib
import signal
import statistics
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.data.input import InputPath, evaluation_batches
from paceline.data.loading import load_dataset
from paceline.data.order import SampleOrder
from paceline.errors import DivergedError, PacelineError, StoppedError
from paceline.measure.clock import PhaseClock
from paceline.measure.scalars import ScalarWriter
from paceline.models.loading import build_model
from paceline.records import TRAFFIC_KINDS, EventWriter, RunFolder
from paceline.sync.options import create_strategy
from paceline.sync.replica import Replica
from paceline.sync.strategy import Strategy
from paceline.worker import state
from paceline.worker.checkpoint import Checkpoint, CheckpointStore
from paceline.worker.device import autocast, choose_device, computing
from paceline.worker.display import Display
from paceline.worker.fingerprint import weights_sha256
from paceline.worker.journal import Journal
from paceline.worker.loop import Progress, TrainingLoop
from paceline.worker.optimiser import build_optimizer


@dataclass(slots=True)
class Prepared:
    """What can be checked before a run begins: its data, model and strategy."""

    dataset: Dataset
    model: nn.Module
    strategy: Strategy
    device: torch.device


@dataclass(slots=True)
class WorkerReport:
    """What a worker tells at its end; the launcher makes result.json of it."""

    status: str
    cause: str | None
    exit_code: int
    iterations: int = 0
    weights_sha256: str | None = None
    train_loss: float | None = None
    seconds_to_target: float | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    worker: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    measuring_fraction: float = 0.0
    warnings: list[str] = field(default_factory=list)


def prepare(config: RunConfig) -> Prepared:
    """Load and build, refusing with a UsageError what cannot be trained."""
    strategy = create_strategy(config.strategy, config.options)
    device = choose_device(config)
    dataset = load_dataset(config)
    model = build_model(config.model, dataset.sample_shape, dataset.classes, config.seed)
    return Prepared(dataset, model, strategy, device)


def run_worker(
    config: RunConfig,
    folder: RunFolder,
    prepared: Prepared,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    display: Display,
    clock: PhaseClock,
) -> WorkerReport:
    """Train, from a checkpoint if one is given; whatever ends the run is told in the report."""
    events = EventWriter(folder.events_file(0))
    with computing(config), contextlib.ExitStack() as stack:
        worker = _Worker(config, folder, prepared, events, display, clock, store, checkpoint)
        stack.callback(worker.journal.close)
        try:
            worker.begin()
            with _stop_on_signals(worker.loop):
                worker.loop.run()
            store.close()
            report = worker.report("finished", None, 0)
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - told in the report
            report = worker.report(*_explain(error, folder))
            with contextlib.suppress(PacelineError):
                store.close()
        events.write("end", status=report.status, cause=report.cause)
    return report


class _Worker:
    """The parts of one worker, put together."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        prepared: Prepared,
        events: EventWriter,
        display: Display,
        clock: PhaseClock,
        store: CheckpointStore,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.clock = clock
        self.store = store
        self.checkpoint = checkpoint
        self.events = events
        self.dataset = prepared.dataset
        self.strategy = prepared.strategy
        self.phases_before: dict[str, float] = {}
        self.iteration_seconds_before: Sequence[float] = ()
        self.warnings = list(prepared.dataset.warnings)
        device = prepared.device
        self.replica = _build_replica(config, prepared, clock)
        train, mean, std = self.dataset.train, self.dataset.mean, self.dataset.std
        order = SampleOrder(len(train), config.global_batch_size, config.seed, config.reshuffle)
        inputs = InputPath(
            train,
            mean,
            std,
            order,
            augment=config.augment,
            seed=config.seed,
            device=device,
            channels_last=config.channels_last,
        )
        self.journal = Journal(
            events,
            _scalars(config, folder, checkpoint),
            display,
            config.iterations_in_total(order.batches_per_epoch),
        )
        self.loop = TrainingLoop(
            config,
            self.replica,
            self.strategy,
            inputs,
            lambda: evaluation_batches(
                self.dataset.test,
                mean,
                std,
                config.eval_batch_size,
                device=device,
                channels_last=config.channels_last,
            ),
            self.journal,
            autocast(config, device),
            Progress(),
            self._checkpoint if config.checkpoint_every != "never" else None,
        )

    def begin(self) -> None:
        self.strategy.attach(self.replica)
        if self.checkpoint:
            self._resume(self.checkpoint)
        self.events.write(
            "start",
            iteration=self.loop.progress.iteration,
            resumed=self.checkpoint is not None,
        )
        # The state may be as large as the model: it is not needed twice.
        self.checkpoint = None
        for text in self.warnings:
            self.journal.warn(text)

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.warnings += checkpoint.warnings
        self.loop.progress = state.restore(checkpoint.state, self.replica, self.strategy)
        account = checkpoint.state["account"]
        self.phases_before = account["phases"]
        self.iteration_seconds_before = account["iteration_seconds"].tolist()
        self.journal.display.say(f"resuming after iteration {checkpoint.iteration}")

    def _checkpoint(self) -> None:
        saved = state.gather(self.replica, self.strategy, self.loop.progress)
        saved["account"] = {
            "phases": self._phases(),
            "iteration_seconds": torch.tensor(self._iteration_seconds(), dtype=torch.float64),
        }
        blocked = self.store.blocked_seconds
        self.store.save(self.loop.progress.iteration, saved)
        self.events.write(
            "checkpoint",
            iteration=self.loop.progress.iteration,
            blocked_seconds=self.store.blocked_seconds - blocked,
        )

    def _phases(self) -> dict[str, float]:
        before = self.phases_before
        return {name: before.get(name, 0.0) + spent for name, spent in self.clock.seconds.items()}

    def _iteration_seconds(self) -> list[float]:
        return [*self.iteration_seconds_before, *self.loop.iteration_seconds]

    def report(self, status: str, cause: str | None, exit_code: int) -> WorkerReport:
        progress = self.loop.progress
        sha = weights_sha256(self.replica.model.state_dict())
        per_switch = PhaseClock.seconds_per_switch()
        self.clock.enter("other")
        phases = self._phases()
        measuring = self.clock.switches * per_switch + self.journal.seconds_spent
        return WorkerReport(
            status=status,
            cause=cause,
            exit_code=exit_code,
            iterations=progress.iteration,
            weights_sha256=sha,
            train_loss=self.journal.train_loss,
            seconds_to_target=progress.seconds_to_target,
            history=progress.history,
            worker={
                "rank": 0,
                "node": 0,
                "samples": progress.samples,
                "wall_seconds": sum(self.phases_before.values()) + self.clock.wall_seconds,
                "iteration_seconds": summarise_iterations(self._iteration_seconds()),
                "phases": phases,
                "hidden_exchange_seconds": 0.0,
                "traffic": {
                    kind: {"bytes_sent": 0, "bytes_received": 0, "messages": 0}
                    for kind in TRAFFIC_KINDS
                },
            },
            checkpoints={
                "count": self.store.count,
                "bytes": self.store.bytes,
                "blocked_seconds": self.store.blocked_seconds,
                "background_seconds": self.store.background_seconds,
                "extra_memory_bytes": self.store.extra_memory_bytes,
            },
            measuring_fraction=measuring / max(self.clock.wall_seconds, 1e-9),
            warnings=self.warnings,
        )


def summarise_iterations(seconds: Sequence[float]) -> dict[str, float | None]:
    """The first iteration apart, and the others' mean, median and 95th percentile."""
    if not seconds:
        return dict.fromkeys(("first", "mean", "median", "p95"))
    rest = sorted(seconds[1:]) or [seconds[0]]
    return {
        "first": seconds[0],
        "mean": statistics.fmean(rest),
        "median": statistics.median(rest),
        "p95": rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))],
    }


def _scalars(
    config: RunConfig, folder: RunFolder, checkpoint: Checkpoint | None
) -> ScalarWriter | None:
    resumed_step = checkpoint.iteration if checkpoint else None
    return ScalarWriter(folder.tensorboard, resumed_step) if config.tensorboard else None


def _build_replica(config: RunConfig, prepared: Prepared, clock: PhaseClock) -> Replica:
    model = prepared.model.to(prepared.device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Replica(
        model=model,
        optimizer=build_optimizer(config, model.parameters()),
        clock=clock,
        forward=torch.compile(model) if config.compile else model,
        scaler=torch.amp.GradScaler(prepared.device.type, enabled=config.precision == "fp16"),
        clip_norm=config.clip_norm,
    )


def _explain(error: BaseException, folder: RunFolder) -> tuple[str, str, int]:
    """Status, cause in a line, and exit code; the traceback of a surprise goes into a file."""
    if isinstance(error, KeyboardInterrupt):
        error = StoppedError("interrupted")
    if isinstance(error, PacelineError):
        kinds: dict[type, str] = {DivergedError: "diverged", StoppedError: "stopped"}
        return kinds.get(type(error), "failed"), str(error), error.exit_code
    file = folder.path / "traceback.txt"
    with contextlib.suppress(OSError):
        file.write_text("".join(traceback.format_exception(error)))
    cause = f"{type(error).__name__}: {error}".splitlines()[0]
    return "failed", f"{cause} (traceback in {file})", 1


@contextlib.contextmanager
def _stop_on_signals(loop: TrainingLoop) -> Iterator[None]:
    """Let Ctrl-C or a termination signal end the loop between iterations; a second one, at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)

    def request(number: int, frame: FrameType | None) -> None:
        if loop.stop_requested:
            raise KeyboardInterrupt
        loop.stop_requested = f"stopped by {signal.Signals(number).name}"

    before = [signal.signal(number, request) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
