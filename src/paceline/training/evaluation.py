"""Loss and metrics of the test set."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.data.pipeline import EvaluationPipeline
from paceline.data.resident import ResidentEvaluationPipeline, evaluation_pipeline_for
from paceline.data.sampling import shard_bounds
from paceline.strategies.replica import Replica, synchronize_buffers
from paceline.strategies.strategy import Strategy
from paceline.training.gpu.cuda_graph import GraphCache
from paceline.training.loss import loss_of
from paceline.training.metrics import Metrics
from paceline.training.views import averaged_over_views

MAX_LOGITS_BYTES = 1 << 30
"""Of a batch of token sequences. With a large vocabulary, 1000 of them would not fit in memory."""


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
        graphs: GraphCache | None = None,
    ) -> None:
        """With `graphs`, the work on batches of a resident test set is captured and replayed."""
        self._config = config
        self._replica = replica
        self._strategy = strategy
        self._dataset = dataset
        self._device = device
        self._autocast = autocast
        self._graphs = graphs
        self._forward = averaged_over_views(replica.forward, config.eval_views)
        self._loss = loss_of(replica.model)
        self._metrics = Metrics(config, dataset, self._loss)
        self._totals = torch.zeros(1 + self._metrics.size, dtype=torch.float64, device=device)
        """Sum of the losses and sums of the metrics."""
        self._pipelines: dict[bool, EvaluationPipeline] = {}

    def __call__(self, alone: bool) -> tuple[float, dict[str, float | None]]:
        """Return the mean loss and the metrics of the test set.

        Each rank evaluates a shard of the test set, or, with `alone`, this rank all of it.
        """
        replica, config = self._replica, self._config
        communicator = None if alone else replica.communicator
        if alone not in self._pipelines:
            self._pipelines[alone] = self._open_pipeline(communicator)
        with self._autocast, self._strategy.eval_weights():
            if communicator is not None:
                synchronize_buffers(replica.model, communicator, config.buffers)
            sums = self._sum_up(self._pipelines[alone], alone)
        if communicator is not None and communicator.world_size > 1:
            communicator.all_reduce(sums, "metrics").wait()
        loss, *metric_sums, samples = sums.tolist()
        target = self._dataset.test.targets[0]
        loss /= samples * self._loss.predictions(target)
        return loss, self._metrics.values(loss, metric_sums, samples * target.numel())

    def _open_pipeline(self, communicator: Communicator | None) -> EvaluationPipeline:
        test = self._dataset.test
        if communicator is not None:
            equal = [1.0] * communicator.world_size
            test = test.part(shard_bounds(len(test), equal, communicator.rank))
        return evaluation_pipeline_for(
            test,
            self._dataset.transform,
            self._batch_size(),
            device=self._device,
            channels_last=self._config.is_channels_last,
        )

    def _batch_size(self) -> int:
        samples, dataset = self._config.eval_batch_size, self._dataset
        if not dataset.has_tokens:
            return samples
        logits_bytes = 4 * dataset.classes * dataset.test.targets[0].numel()
        return max(1, min(samples, MAX_LOGITS_BYTES // logits_bytes))

    def _sum_up(self, pipeline: EvaluationPipeline, alone: bool) -> Tensor:
        """Return the sums of losses and metrics, and the number of samples, on the CPU."""
        model = self._replica.model
        was_training = model.training
        model.eval()
        self._totals.zero_()
        evaluated = 0
        with torch.inference_mode():
            for first, samples in pipeline.batches:
                pipeline.seek(first)
                add = partial(self._add, pipeline, samples)
                if self._graphs is not None and isinstance(pipeline, ResidentEvaluationPipeline):
                    self._graphs.run((alone, samples), add)
                else:
                    add()
                evaluated += samples
        model.train(was_training)
        return torch.cat([self._totals.cpu(), torch.tensor([evaluated], dtype=torch.float64)])

    def _add(self, pipeline: EvaluationPipeline, samples: int) -> Tensor:
        inputs, targets = pipeline.gather(samples)
        loss, outputs = self._loss.evaluate(self._forward, inputs, targets)
        sums = [loss, *self._metrics.sums(outputs, targets)]
        self._totals.add_(torch.stack([self._as_total(one) for one in sums]))
        return self._totals

    def _as_total(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._totals)
        # Filled on the device: a copy from the CPU could not be captured.
        return torch.full_like(self._totals[0], value)
