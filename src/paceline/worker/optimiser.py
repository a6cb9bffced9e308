"""The optimiser of a config, in torch's fused form: one call for all tensors."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.config import RunConfig


def build_optimizer(config: RunConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    weights = [weight for weight in parameters if weight.requires_grad]
    if config.optimizer == "sgd":
        return SGD(
            weights,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[config.optimizer]
    return kind(
        weights,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
