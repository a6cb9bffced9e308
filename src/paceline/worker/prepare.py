"""What can be built and refused before a run begins: its data, model and strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.data.loading import load_dataset
from paceline.data.order import SampleOrder
from paceline.errors import CheckpointError, UserCodeError
from paceline.measure.startup import StartupTimer
from paceline.models.loading import build_model
from paceline.sync.options import create_strategy
from paceline.sync.strategy import Strategy
from paceline.worker.checkpoint import Checkpoint
from paceline.worker.device import choose_device


@dataclass(slots=True)
class Prepared:
    dataset: Dataset
    model: nn.Module
    strategy: Strategy
    device: torch.device


def prepare(
    config: RunConfig, local_rank: int = 0, startup: StartupTimer | None = None
) -> Prepared:
    """Load and build, refusing with a UsageError what cannot be trained.

    `startup` counts the seconds of it as `data` and `model`, and is left in `model`.
    """
    startup = startup or StartupTimer(0.0)
    startup.enter("model")
    strategy = create_strategy(config.strategy, config.options)
    device = choose_device(config, local_rank)
    startup.enter("data")
    dataset = load_dataset(config)
    startup.enter("model")
    model = build_model(config.model, dataset.sample_shape, dataset.classes, config.seed)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserCodeError(f"model {config.model!r} has no weights to train")
    return Prepared(dataset, model, strategy, device)


def check_work_is_left(
    config: RunConfig, prepared: Prepared, checkpoint: Checkpoint, is_finished: bool
) -> None:
    """Refuse to resume what has come to its end already: its result must stay as it is.

    A run with a checkpoint of its last iteration but without a result can still write one.
    """
    order = SampleOrder(len(prepared.dataset.train), config.global_batch_size, config.seed)
    total = config.iterations_in_total(order.batches_per_epoch)
    if checkpoint.iteration > total or (checkpoint.iteration == total and is_finished):
        raise CheckpointError(
            f"the run has done all of its {total} iterations:"
            " give more --epochs or --iterations to go on"
        )
