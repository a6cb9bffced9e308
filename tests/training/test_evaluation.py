"""Evaluation of token sequences in batches that fit in memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from paceline.comm import in_process
from paceline.config import from_mapping
from paceline.data.loading import load_dataset
from paceline.measure.phase_clock import PhaseClock
from paceline.models.build import build_model
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.training import evaluation
from paceline.training.evaluation import Evaluator
from paceline.training.optimizer import build_optimizer

CONTEXT, VOCABULARY = 16, 256
LOGITS_BYTES = CONTEXT * VOCABULARY * 4


def evaluated(eval_batch_size: int) -> tuple[float, list[int]]:
    """Return the test loss of a model, and the sizes of the batches."""
    config = from_mapping(
        {
            "model": "gpt-nano",
            "data": "stories",
            "context": CONTEXT,
            "train_samples": 8,
            "batch_size": 8,
            "channels_last": "off",
            "test_samples": 10,
            "eval_batch_size": eval_batch_size,
        }
    )
    dataset = load_dataset(config)
    model = build_model(config.model, dataset.sample_shape, VOCABULARY, 0, has_tokens=True)
    sizes = []

    def forward(tokens: Tensor) -> Tensor:
        sizes.append(len(tokens))
        logits: Tensor = model(tokens)
        return logits

    replica = Replica(
        model=model,
        optimizer=build_optimizer(config, model.parameters()),
        clock=PhaseClock(),
        forward=forward,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        communicator=in_process.single(),
    )
    strategy = create_strategy("single", {})
    strategy.setup(replica)
    evaluate = Evaluator(config, replica, strategy, dataset, torch.device("cpu"), nullcontext())
    return evaluate(alone=True)[0], sizes


@pytest.mark.parametrize(
    ("limit_bytes", "sizes"),
    [(4 * LOGITS_BYTES, [4, 4, 2]), (3 * LOGITS_BYTES - 1, [2] * 5), (1, [1] * 10)],
)
def test_batches_of_tokens_are_smaller_if_their_logits_need_much_memory(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, sizes: list[int]
) -> None:
    loss, found = evaluated(eval_batch_size=8)
    assert found == [8, 2]
    monkeypatch.setattr(evaluation, "MAX_LOGITS_BYTES", limit_bytes)
    limited_loss, found = evaluated(eval_batch_size=8)
    assert found == sizes
    assert limited_loss == pytest.approx(loss)
