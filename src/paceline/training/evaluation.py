"""Loss and accuracy on the test set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.data.pipeline import evaluation_batches
from paceline.data.sampling import shard_bounds
from paceline.strategies.replica import Replica, synchronize_buffers
from paceline.strategies.strategy import Strategy
from paceline.training.loss import count_correct, cross_entropy
from paceline.training.views import averaged_over_views


class Evaluator:
    """Evaluates the weights that a strategy holds for evaluation."""

    def __init__(
        self,
        config: RunConfig,
        replica: Replica,
        strategy: Strategy,
        dataset: Dataset,
        device: torch.device,
        autocast: AbstractContextManager[Any],
    ) -> None:
        self._config = config
        self._replica = replica
        self._strategy = strategy
        self._dataset = dataset
        self._device = device
        self._autocast = autocast

    def __call__(self, alone: bool) -> tuple[float, float]:
        """Return test loss and accuracy.

        Each rank evaluates a shard of the test set, or, with `alone`, this rank all of it.
        """
        replica, config, dataset = self._replica, self._config, self._dataset
        communicator = None if alone else replica.communicator
        shard = slice(None)
        if communicator is not None:
            equal = [1.0] * communicator.world_size
            shard = shard_bounds(len(dataset.test), equal, communicator.rank)
        batches = evaluation_batches(
            dataset.test.part(shard),
            dataset.transform,
            config.eval_batch_size,
            device=self._device,
            channels_last=config.is_channels_last,
        )
        with self._autocast, self._strategy.eval_weights():
            if communicator is not None:
                synchronize_buffers(replica.model, communicator, config.buffers)
            forward = averaged_over_views(replica.forward, config.eval_views)
            return evaluate(replica.model, forward, batches, communicator)


def evaluate(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    communicator: Communicator | None = None,
) -> tuple[float, float]:
    """Return mean cross-entropy and accuracy; the model stays in its mode.

    With `communicator`, the result covers the batches of all ranks. Collective.
    """
    was_training = model.training
    model.eval()
    loss_sum: Tensor | float = 0.0
    correct: Tensor | int = 0
    count = 0
    with torch.inference_mode():
        for inputs, targets in batches:
            logits = forward(inputs).float()
            loss_sum = loss_sum + cross_entropy(logits, targets, reduction="sum").double()
            correct = correct + count_correct(logits, targets)
            count += targets.numel()
    model.train(was_training)
    totals = torch.tensor([float(loss_sum), float(correct), count], dtype=torch.float64)
    if communicator is not None and communicator.world_size > 1:
        communicator.all_reduce(totals, "metrics").wait()
    return float(totals[0] / totals[2]), float(totals[1] / totals[2])
