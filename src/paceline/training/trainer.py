"""One worker of a run: build data, model and strategy, resume, train, write checkpoints, report.

`prepare` loads and checks everything before any record is written. `run_worker` trains and returns
a report, whatever ends the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.connection import Connection
from paceline.comm.objects import first_value
from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.data.loading import load_dataset
from paceline.data.pipeline import EvaluationPipeline, InputPipeline
from paceline.data.resident import pipeline_for
from paceline.data.sampling import GlobalBatchSampler
from paceline.errors import (
    AgreedStopError,
    CheckpointError,
    ConfigError,
    PacelineError,
    RunError,
    UserCodeError,
    error_line,
)
from paceline.measure.kernel_time import kernel_timer_for
from paceline.measure.memory import WorkerMemory
from paceline.measure.noise_scale import read_noise_samples
from paceline.measure.phase_clock import CudaPhaseClock, PhaseClock, clock_for
from paceline.measure.startup import StartupTimer
from paceline.measure.tensorboard import TensorBoardWriter
from paceline.measure.trace import Tracer
from paceline.models.build import GroupedModel, build_model, initialize_from_data, seeded
from paceline.records import EventWriter, RunFolder, numerics_text
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.strategies.sync_batch_norm import convert_sync_batch_norm
from paceline.training import run_state
from paceline.training.checkpoint import Checkpoint, CheckpointStore
from paceline.training.coordination import StepCoordinator, noise_meter
from paceline.training.device import choose_device, computing, side_stream
from paceline.training.display import Display
from paceline.training.evaluation import Evaluator
from paceline.training.gpu.batch_norm import use_fast_batch_norm
from paceline.training.gpu.cuda_graph import (
    CaptureReport,
    CudaGraphBackend,
    GraphCache,
    capture_obstacle,
    settings_obstacle,
)
from paceline.training.gpu.precision import Choice, GpuStepTimer, autocast, resolve
from paceline.training.gpu.step_times import describe_step, remembered
from paceline.training.loop import StopRequest, TrainingLoop
from paceline.training.loss import Loss, loss_of
from paceline.training.metrics import Metrics
from paceline.training.optimizer import build_optimizer
from paceline.training.rank_report import (
    RankReport,
    RunTotals,
    account_of,
    explain,
    final_weights_sha256,
)
from paceline.training.run_logger import RunLogger
from paceline.training.run_state import Progress
from paceline.training.step import TrainStep


@dataclass(slots=True)
class Prepared:
    """What a worker prepares before it communicates with the other ranks."""

    dataset: Dataset
    model: nn.Module
    strategy: Strategy
    device: torch.device
    memory: WorkerMemory


def prepare(
    config: RunConfig, local_rank: int = 0, startup: StartupTimer | None = None
) -> Prepared:
    """Load the dataset and build model and strategy; raises UsageError if they cannot be trained.

    `startup` counts the time as `device`, `data` and `model`, and continues in `model`.
    """
    startup = startup or StartupTimer(0.0)
    startup.enter("model")
    strategy = create_strategy(config.strategy, config.options)
    startup.enter("device")
    device = choose_device(config, local_rank)
    startup.enter("data")
    dataset = load_dataset(config)
    startup.enter("model")
    memory = WorkerMemory(device)
    model = build_model(
        config.model,
        dataset.sample_shape,
        dataset.classes,
        config.seed,
        options=config.model_options,
        has_tokens=dataset.has_tokens,
    )

    def first_inputs(samples: int) -> Tensor:
        head = dataset.train.head(samples)
        return EvaluationPipeline(head, dataset.transform, len(head)).gather(len(head))[0]

    initialize_from_data(config.model, model, first_inputs, config.seed)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserCodeError(f"model {config.model!r} has no weights to train")
    loss = loss_of(model)
    loss.check(config, dataset)
    metrics = Metrics(config, dataset, loss)
    if config.metrics:
        _try_metrics(config, dataset, model, loss, metrics)
    return Prepared(dataset, model, strategy, device, memory)


def _try_metrics(
    config: RunConfig, dataset: Dataset, model: nn.Module, loss: Loss, metrics: Metrics
) -> None:
    """Raise UserCodeError for a metric that fails, which would otherwise show after an epoch."""
    head = dataset.test.head(2)
    inputs, targets = EvaluationPipeline(head, dataset.transform, 2).gather(len(head))
    model.eval()
    try:
        with torch.inference_mode(), seeded(config.seed):
            outputs = loss.evaluate(model, inputs, targets)[1]
    except Exception:  # noqa: BLE001 - a model may need a GPU; the first step shows other errors
        return
    finally:
        model.train()
    metrics.sums(outputs, targets)


def check_work_is_left(
    config: RunConfig, prepared: Prepared, checkpoint: Checkpoint, is_finished: bool
) -> None:
    """Raise CheckpointError if a run is complete, so that its result is not overwritten.

    A run with a checkpoint of its last iteration but without a result can still write one.
    """
    order = GlobalBatchSampler(len(prepared.dataset.train), config.global_batch_size, config.seed)
    total = config.iterations_in_total(order.batches_per_epoch)
    if checkpoint.iteration > total:
        budget = "--epochs" if config.iterations is None else "--iterations"
        epochs = checkpoint.iteration / order.batches_per_epoch
        done = f"{checkpoint.iteration:,} iterations"
        if config.iterations is None:
            done += f" ({epochs:.4g} epochs)"
        raise CheckpointError(f"the run has done {done}: {budget} must be more than that")
    if checkpoint.iteration == total and is_finished:
        raise CheckpointError(
            f"the run has done all of its {total:,} iterations:"
            " increase --epochs or --iterations to continue"
        )


@dataclass(slots=True)
class RankContext:
    """Rank, communicators and checkpoint store of one worker."""

    rank_info: RankInfo
    communicator: Communicator
    store: CheckpointStore | None
    """Only on rank 0."""
    servers: Sequence[Connection] = ()
    """One connection per parameter server."""


def run_worker(
    config: RunConfig,
    folder: RunFolder,
    prepared: Prepared,
    context: RankContext,
    checkpoint: Checkpoint | None,
    display: Display,
    clock: PhaseClock,
) -> RankReport:
    """Train, starting from `checkpoint` if there is one; the report says how the run ended."""
    # The clock of a GPU waits for its context.
    clock.startup.enter("device")
    with contextlib.ExitStack() as stack:
        stack.enter_context(computing(config, context.rank_info.local_rank))
        stack.enter_context(side_stream(prepared.device))
        clock = clock_for(prepared.device, clock)
        clock.startup.enter("precision")
        could_capture = _could_capture(config, prepared, context)
        # Launching the fast kernels takes Python longer, and a compiled model has its own.
        if could_capture and not config.compile:
            use_fast_batch_norm(prepared.model)
        choice = _resolve_precision(config, prepared, context, checkpoint, could_capture)
        clock.startup.enter("model")
        trainer = Trainer(config, choice, folder, prepared, context, checkpoint, display, clock)
        stack.enter_context(contextlib.closing(trainer.logger))
        try:
            trainer.begin(checkpoint)
            with trainer.stop.on_signals():
                trainer.train()
            report = trainer.report("finished", None, 0)
        except (KeyboardInterrupt, SystemExit, Exception) as error:  # noqa: BLE001 - goes into the report
            report = trainer.report(*explain(error, folder))
            report.is_secondary = isinstance(error, PacelineError) and error.is_secondary
            report.is_together = isinstance(error, AgreedStopError)
        # A full disk may have ended the run, and the result must still be written.
        with contextlib.suppress(RunError):
            trainer.logger.events.write("end", status=report.status, cause=report.cause)
    return report


class Trainer:
    """Builds the objects of one worker, trains, and reports."""

    def __init__(
        self,
        config: RunConfig,
        choice: Choice,
        folder: RunFolder,
        prepared: Prepared,
        context: RankContext,
        checkpoint: Checkpoint | None,
        display: Display,
        clock: PhaseClock,
    ) -> None:
        self.config = config = choice.apply(config)
        self.choice = choice
        self.folder = folder
        self.prepared = prepared
        self.context = context
        self.clock = clock
        self.warnings = list(prepared.dataset.warnings)
        self.stop = StopRequest()
        self.capture_report = CaptureReport(reason="the run ended before the first step")
        self.progress = Progress()
        self.kernel_time: dict[str, float] | None = None
        """Of the traced iterations."""
        self.replica = _build_replica(config, prepared, context, clock)
        self.totals = RunTotals(clock, self.replica, context.store)
        self.coordinator = StepCoordinator(config, prepared.strategy, self.replica)
        train = prepared.dataset.train
        self.order = GlobalBatchSampler(
            len(train), config.global_batch_size, config.seed, config.reshuffle
        )
        self.total = config.iterations_in_total(self.order.batches_per_epoch)
        self.logger = RunLogger(
            EventWriter(folder.events_file(context.rank_info.rank)),
            _open_tensorboard(config, folder, context.rank_info, checkpoint),
            display,
            self.total,
            clock,
            self.coordinator,
            prepared.strategy,
        )

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Bring all ranks to the initial state or that of the checkpoint. Collective."""
        strategy = self.prepared.strategy
        strategy.setup(self.replica)
        self.replica.noise = noise = noise_meter(self.config, strategy)
        if isinstance(self.config.noise_every, int) and noise.reason is not None:
            text = f"paceline: gradient noise scale not measured: {noise.reason}"
            self.logger.display.say(text)
        if checkpoint:
            self.warnings += checkpoint.warnings
            if self.context.rank_info.rank == 0:
                saved = run_state.saved_settings(checkpoint.state)
                self.warnings += run_state.changed_settings(saved, self.config)
            self.progress, account = run_state.restore(checkpoint.state, self.replica, strategy)
            events = self.folder.events_file(self.context.rank_info.rank)
            steps = range(self.progress.steps_before, self.progress.steps)
            self.totals.restore(account, events, steps, checkpoint.iteration)
            self.replica.noise.samples.extend(read_noise_samples(events, checkpoint.iteration))
            self.logger.recent_losses.extend(account.get("recent_losses", ()))
            self.logger.display.say(f"paceline: resuming after iteration {checkpoint.iteration}")
        if self.choice.step_seconds:
            self.logger.display.say(f"paceline: precision {numerics_text(self.choice.to_dict())}")
        self.logger.events.write(
            "start",
            iteration=self.progress.iteration,
            resumed=checkpoint is not None,
            workers=self.context.rank_info.world_size,
        )
        for text in self.warnings:
            self.logger.warn(text)

    def train(self) -> None:
        tracer = self._build_tracer() if self.config.trace else None
        loop = self._build_loop(tracer)
        self.coordinator.start()
        self.prepared.memory.setup_done()
        self.clock.startup.end()
        try:
            loop.run()
        finally:
            if tracer:
                self._write_trace(tracer)
        if self.context.store:
            self._complete_checkpoints(self.context.store)

    def _build_loop(self, tracer: Tracer | None) -> TrainingLoop:
        config, dataset, device = self.config, self.prepared.dataset, self.prepared.device
        pipeline = pipeline_for(
            dataset.train,
            dataset.transform,
            self.order,
            augment=config.augment,
            seed=config.seed,
            device=device,
            channels_last=config.is_channels_last,
        )
        replica, strategy, precision = (
            self.replica,
            self.prepared.strategy,
            autocast(config.precision, device),
        )
        step_graphs, evaluation_graphs = self._build_graphs(pipeline)
        return TrainingLoop(
            config,
            self.progress,
            self.totals,
            TrainStep(
                config,
                replica,
                strategy,
                pipeline,
                self.coordinator,
                precision,
                self.prepared.memory,
                step_graphs,
            ),
            Evaluator(config, replica, strategy, dataset, device, precision, evaluation_graphs),
            self.logger,
            self.coordinator,
            self.stop,
            self._checkpoint if config.checkpoint_every != "never" else None,
            tracer,
        )

    def _build_graphs(
        self, pipeline: InputPipeline
    ) -> tuple[GraphCache, GraphCache] | tuple[None, None]:
        """Return graphs of training steps and of evaluation; None if they run eagerly."""
        config, device, strategy = self.config, self.prepared.device, self.prepared.strategy
        obstacle = capture_obstacle(config, device, pipeline, strategy)
        if obstacle is not None:
            if config.cuda_graph == "on":
                raise ConfigError([f"--cuda-graph on: {obstacle}; use auto"])
            if device.type == "cuda" and config.cuda_graph == "auto":
                self.logger.display.say(f"paceline: no CUDA graph of the steps: {obstacle}")
            self.capture_report = CaptureReport(reason=obstacle)
            return None, None
        assert isinstance(self.clock, CudaPhaseClock)
        if config.noise_every == "auto" and self.replica.noise.every:
            self.replica.noise.disable("steps are captured in a CUDA graph: use --noise-every N")
        # Training and evaluation never run at the same time, so their graphs can share memory.
        backend = CudaGraphBackend()
        step_graphs = GraphCache(
            backend,
            [self.clock, self.replica.noise, *strategy.replay_observers()],
            warmup=strategy.warmup_steps,
            is_warm=strategy.is_warm,
            model=self.replica.model,
            agree=partial(first_value, self.replica.communicator),
            on_failure=self._continue_eagerly,
        )
        self.capture_report = step_graphs.report
        evaluation_graphs = GraphCache(
            backend,
            [],
            warmup=1,
            copies=1,
            model=self.replica.model,
            on_failure=lambda reason: self._warn(f"no CUDA graph of the evaluation: {reason}"),
        )
        return step_graphs, evaluation_graphs

    def _continue_eagerly(self, reason: str) -> None:
        if self.config.cuda_graph == "on":
            raise UserCodeError(f"--cuda-graph on: a step cannot be captured: {reason}; use auto")
        self.prepared.strategy.discard_step()
        self._warn(f"no CUDA graph of the steps, which take longer without one: {reason}")

    def _build_tracer(self) -> Tracer:
        done = self.progress.steps
        return Tracer(
            self.clock,
            self.context.communicator.traffic,
            iterations=self.config.trace,
            done=done,
            left=self.total - done,
            kernels=kernel_timer_for(self.prepared.device),
        )

    def _write_trace(self, tracer: Tracer) -> None:
        rank_info = self.context.rank_info
        self.kernel_time = tracer.kernel_time()
        offset_seconds = self.coordinator.clock_offset.at(tracer.began)
        try:
            tracer.write(
                self.folder.trace_file(rank_info.rank),
                rank_info.rank,
                rank_info.node_rank,
                offset_seconds,
            )
        except OSError as error:
            self.warnings.append(f"the trace of rank {rank_info.rank} is missing: {error.strerror}")

    def _checkpoint(self) -> None:
        store = self.context.store
        blocked = store.blocked_seconds if store else 0.0
        if store:
            # Otherwise the totals would not include the checkpoint that is being written.
            try:
                store.close()
            except Exception as error:  # noqa: BLE001 - this checkpoint replaces the failed one
                self._warn(_cause(error))
        account = {**self.totals.to_dict(), "recent_losses": [*self.logger.recent_losses]}
        # The event of this checkpoint covers this wait as well.
        account["checkpoints"]["blocked_seconds"] = blocked
        saved = run_state.gather(self.replica, self.prepared.strategy, self.progress, account)
        if saved is None or store is None:
            return
        saved["settings"] = run_state.kept_settings(self.config)
        store.save(self.progress.iteration, saved)
        self.logger.events.write(
            "checkpoint",
            iteration=self.progress.iteration,
            blocked_seconds=store.blocked_seconds - blocked,
        )

    def _complete_checkpoints(self, store: CheckpointStore) -> None:
        """Wait for the last checkpoint; write it in this thread if the background write failed."""
        failure = None
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - raised again below if it still applies
            failure = error
        # An earlier call may have raised the failure, so check the store.
        iteration = store.write_again()
        if iteration is not None:
            cause = f"{_cause(failure)}; " if failure else ""
            self._warn(f"{cause}the checkpoint of iteration {iteration} was written again")
        elif failure is not None:
            raise failure

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        # A full disk is a likely cause, and then the event cannot be written either.
        with contextlib.suppress(RunError):
            self.logger.warn(text)

    def report(self, status: str, cause: str | None, exit_code: int) -> RankReport:
        store = self.context.store
        sha = final_weights_sha256(self.replica, self.prepared.strategy)
        measuring = self.clock.measuring_seconds() + self.logger.seconds_spent
        if store:
            try:
                self._complete_checkpoints(store)
            except Exception as error:  # noqa: BLE001 - reported as a warning
                self._warn(f"the last checkpoint could not be written: {_cause(error)}")
        self.clock.enter("other")
        self.clock.startup.end()
        return RankReport(
            status=status,
            cause=cause,
            exit_code=exit_code,
            is_secondary=False,
            ended=time.time(),
            is_together=True,
            iterations=self.progress.iteration,
            weights_sha256=sha,
            train_loss=self.logger.train_loss,
            seconds_to_target=self.progress.seconds_to_target,
            history=self.progress.history,
            worker={
                **account_of(
                    self.context.rank_info,
                    self.progress.samples,
                    self.totals.phases,
                    self.totals.iteration_seconds,
                    self.replica,
                    self.prepared.strategy,
                    self.totals.steady,
                ),
                "numerics": self.choice.to_dict(),
                "startup_seconds": self.clock.startup.seconds,
                "kernel_time": self.kernel_time,
                "memory": self.prepared.memory.to_dict(),
                **self._noise_account(),
                **self._device_account(),
            },
            checkpoints=self.totals.checkpoints,
            measuring_fraction=measuring / max(self.clock.wall_seconds, 1e-9),
            warnings=self.warnings,
            samples_before=self.progress.samples_before,
        )

    def _noise_account(self) -> dict[str, Any]:
        """Return an entry of rank 0; all ranks know the same."""
        is_first = self.context.rank_info.rank == 0
        return {"noise_scale": self.replica.noise.summary()} if is_first else {}

    def _device_account(self) -> dict[str, Any]:
        """Return the entries of a worker that trains on a GPU."""
        is_gpu = self.prepared.device.type == "cuda"
        return {"cuda_graph": asdict(self.capture_report)} if is_gpu else {}


def _cause(error: Exception) -> str:
    return str(error) if isinstance(error, PacelineError) else error_line(error)


def _open_tensorboard(
    config: RunConfig, folder: RunFolder, rank_info: RankInfo, checkpoint: Checkpoint | None
) -> TensorBoardWriter | None:
    if not config.tensorboard or rank_info.rank:
        return None
    # A run that restarts without a checkpoint overwrites its earlier scalars.
    step = 0 if folder.tensorboard.is_dir() else None
    return TensorBoardWriter(folder.tensorboard, checkpoint.iteration if checkpoint else step)


def _resolve_precision(
    config: RunConfig,
    prepared: Prepared,
    context: RankContext,
    checkpoint: Checkpoint | None,
    could_capture: bool,
) -> Choice:
    model, device = prepared.model, prepared.device
    backend = CudaGraphBackend() if could_capture else None
    samples = len(prepared.dataset.train)
    measure = remembered(
        GpuStepTimer(config, model, prepared.dataset, device, backend),
        describe_step(config, model, device, samples, captured=could_capture),
    )
    saved = run_state.saved_settings(checkpoint.state) if checkpoint else None
    return resolve(config, model, device, context.communicator, measure, saved)


def _could_capture(config: RunConfig, prepared: Prepared, context: RankContext) -> bool:
    """Return whether steps can probably be captured, if --cuda-graph allows it.

    What depends on it is the same with and without capture, and so are the results.
    """
    # A strategy answers only after its setup; one without its own answer cannot be captured.
    if type(prepared.strategy).capture_obstacle is Strategy.capture_obstacle:
        return False
    settings = dataclasses.replace(config, cuda_graph="auto")
    obstacle = settings_obstacle(settings, prepared.device)
    return obstacle is None and context.communicator.capture_obstacle() is None


def _build_replica(
    config: RunConfig, prepared: Prepared, context: RankContext, clock: PhaseClock
) -> Replica:
    communicator = context.communicator
    model = prepared.model.to(prepared.device)
    if config.sync_bn:
        model = convert_sync_batch_norm(model, communicator)
    if config.is_channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    undecayed = model.undecayed_weights() if isinstance(model, GroupedModel) else ()
    return Replica(
        model=model,
        optimizer=build_optimizer(config, model.parameters(), undecayed),
        clock=clock,
        forward=_compiled(model, config) if config.compile else model,
        scaler=torch.amp.GradScaler(prepared.device.type, enabled=config.precision == "fp16"),
        communicator=communicator,
        node=context.rank_info.node_rank,
        clip_norm=config.clip_norm,
        servers=context.servers,
    )


def _compiled(model: nn.Module, config: RunConfig) -> Any:
    """Compile for each shape, not for shapes in general.

    A captured step keeps the code that it was captured with, and an eager one must use the same.
    Shares that adapt have too many shapes for that.
    """
    return torch.compile(model, dynamic=None if config.shares == ("auto",) else False)
