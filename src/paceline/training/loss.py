"""The loss of a batch: the cross-entropy, or a loss that the user's model brings.

A model brings its own loss as `loss(outputs, targets)`, a method or a module, or returns it from a
forward pass that takes the targets. Either is the mean over the samples of a batch, so that losses
weighted by sample counts add up to the mean over the global batch.

Logits of the cross-entropy have the classes in their last dimension and otherwise the shape of the
targets: one prediction per sample, or one per position of a sample.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import RunConfig
from paceline.data.dataset import Dataset
from paceline.errors import ConfigError, DataError, PacelineError, UserCodeError, whole_error_line
from paceline.models.build import location_in

Forward = Callable[..., Any]
"""The forward pass: the model, or a strategy's wrapper of it."""

TARGET_ARGUMENTS = ("targets", "labels")
"""A forward pass with one of these parameters gets the targets and returns the loss."""


class Loss(ABC):
    @abstractmethod
    def __call__(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a microbatch, for the backward pass."""

    @abstractmethod
    def evaluate(self, forward: Forward, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """Return the sum of the losses of a batch, and the outputs of the model for metrics."""

    def predictions(self, target: Tensor) -> int:
        """Return how many losses `evaluate` adds up for a sample with this target."""
        return 1

    def check(self, config: RunConfig, dataset: Dataset) -> None:
        """Raise UsageError if the loss does not fit the settings or the data."""
        if config.label_smoothing:
            raise ConfigError(["--label-smoothing: the model has its own loss; remove one of them"])


def loss_of(model: nn.Module, label_smoothing: float = 0.0) -> Loss:
    """Return the loss of a model; raises UserCodeError if it has two."""
    name = type(model).__name__
    own = getattr(model, "loss", None)
    argument = _target_argument(model)
    if own is not None and not callable(own):
        raise UserCodeError(
            f"--model: {name}.loss must be a function or module of (outputs, targets),"
            f" got {type(own).__name__}"
        )
    if own is not None and argument:
        raise UserCodeError(
            f"--model: {name} has a loss, and its forward pass takes {argument} to return one:"
            " remove one of them"
        )
    if own is not None:
        return ModelLoss(model)
    return ReturnedLoss(argument) if argument else CrossEntropy(label_smoothing)


def _target_argument(model: nn.Module) -> str | None:
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # such as a scripted model
        return None
    return next((name for name in TARGET_ARGUMENTS if name in parameters), None)


class CrossEntropy(Loss):
    def __init__(self, label_smoothing: float = 0.0) -> None:
        """Smoothing applies in training only."""
        self._label_smoothing = label_smoothing

    def __call__(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(forward(inputs), targets, label_smoothing=self._label_smoothing)

    def evaluate(self, forward: Forward, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        logits = _single_tensor(forward(inputs)).float()
        return cross_entropy(logits, targets, reduction="sum"), logits

    def predictions(self, target: Tensor) -> int:
        return target.numel()

    def check(self, config: RunConfig, dataset: Dataset) -> None:
        if dataset.target_problem:
            raise DataError(f"{dataset.target_problem}; other targets need a model with its loss")


class ModelLoss(Loss):
    """`model.loss(outputs, targets)`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(forward(inputs), targets)

    def evaluate(self, forward: Forward, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        outputs = forward(inputs)
        return self._loss(outputs, targets).double() * len(targets), outputs

    def _loss(self, outputs: Any, targets: Tensor) -> Tensor:
        # Looked up in each call: FSDP replaces the contents of the model.
        loss: Any = self._model.loss
        try:
            value = loss(outputs, targets)
        except (PacelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shapes = f"outputs of {_described(outputs)} and targets of {_described(targets)}"
            cause = f"{whole_error_line(error)}{location_in(type(self._model), error)}"
            raise UserCodeError(f"--model: the loss failed for {shapes}: {cause}") from error
        return _checked(value, "loss must return the mean over the samples")


class ReturnedLoss(Loss):
    """The model returns the loss, alone or with its outputs."""

    def __init__(self, argument: str) -> None:
        self._argument = argument

    def __call__(self, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._split(forward(inputs, **{self._argument: targets}))[0]

    def evaluate(self, forward: Forward, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        loss, outputs = self._split(forward(inputs, **{self._argument: targets}))
        return loss.double() * len(targets), outputs

    def check(self, config: RunConfig, dataset: Dataset) -> None:
        super().check(config, dataset)
        if config.eval_views > 1:
            raise ConfigError(["--eval-views: the model returns its loss; use 1 view"])

    def _split(self, returned: Any) -> tuple[Tensor, Any]:
        """Return the loss, and the outputs; None if the model returns the loss only."""
        loss, outputs = returned, None
        if isinstance(returned, Mapping):
            loss, outputs = returned.get("loss"), returned.get("logits", returned.get("outputs"))
        elif isinstance(returned, tuple) and len(returned) >= 2:
            # nanoGPT returns (logits, loss), Hugging Face (loss, logits, ...).
            is_first = isinstance(returned[0], Tensor) and not returned[0].dim()
            loss, outputs = returned[:2] if is_first else returned[1::-1]
        rule = (
            f"a forward pass that takes {self._argument} must return the loss, (outputs, loss) or"
            " a dict with loss and logits"
        )
        return _checked(loss, rule), outputs


def _checked(loss: Any, rule: str) -> Tensor:
    """Return the loss; does not read its value, which would wait for a GPU."""
    problem = ""
    if not isinstance(loss, Tensor):
        problem = f"got {type(loss).__name__} as the loss"
    elif loss.dim() or not loss.is_floating_point():
        problem = f"got a loss of {_described(loss)}, not one number"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        problem = "got a loss that does not depend on the weights"
    if problem:
        raise UserCodeError(f"--model: {rule}: {problem}")
    assert isinstance(loss, Tensor)
    return loss


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    return f"type {type(value).__name__}"


def _single_tensor(outputs: Any) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise UserCodeError(
            f"--model: returned {type(outputs).__name__}, but the cross-entropy needs a tensor;"
            " other outputs need a model with its loss"
        )
    return outputs


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Return the cross-entropy of all predictions, as a mean or a sum."""
    if _single_tensor(logits).shape[:-1] != targets.shape:
        expected = ", ".join(map(str, (*targets.shape, "classes")))
        raise UserCodeError(
            f"--model: outputs of shape ({expected}) are needed for these targets,"
            f" got {tuple(logits.shape)}"
        )
    if targets.dim() > 1:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    return F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction=reduction)
