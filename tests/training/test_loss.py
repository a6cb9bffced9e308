"""The loss of a batch: cross-entropy of one prediction per sample or per position, or the model's.

Two workers and one with the model's own loss are compared in strategies/contract/.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import from_mapping
from paceline.data.dataset import Dataset, Split
from paceline.errors import ConfigError, DataError, UserCodeError
from paceline.training.loss import CrossEntropy, ModelLoss, ReturnedLoss, cross_entropy, loss_of

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12).view(4, 3) % 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_per_sample_equals_cross_entropy(reduction: str) -> None:
    logits, targets = LOGITS[:, 0], TARGETS[:, 0]
    loss = cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)
    assert torch.equal(loss, expected)


def test_positions_count_as_separate_predictions() -> None:
    flat_logits, flat_targets = LOGITS.reshape(12, 5), TARGETS.reshape(12)
    assert torch.equal(cross_entropy(LOGITS, TARGETS), cross_entropy(flat_logits, flat_targets))
    assert CrossEntropy().predictions(TARGETS[0]) == 3


@pytest.mark.parametrize("logits", [LOGITS[:, 0], LOGITS[:, :2], LOGITS.transpose(1, 2)])
def test_outputs_of_another_shape_are_a_one_line_error(logits: torch.Tensor) -> None:
    with pytest.raises(UserCodeError, match=r"outputs of shape \(4, 3, classes\) are needed"):
        cross_entropy(logits, TARGETS)


@pytest.mark.parametrize("returned", [(LOGITS, None), {"logits": LOGITS}])
def test_outputs_that_are_not_a_tensor_need_a_loss(returned: Any) -> None:
    for apply in (CrossEntropy().__call__, CrossEntropy().evaluate):
        with pytest.raises(UserCodeError, match="needs a tensor; other outputs need a model with"):
            apply(lambda inputs: returned, LOGITS, TARGETS)


class Halves(nn.Module):
    """Its outputs are half of its inputs."""

    def __init__(self, loss: Any = None) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))
        if loss is not None:
            self.loss = loss

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Computed(Halves):
    """Returns the mean squared error, in a form that depends on the case."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        outputs = super().forward(inputs)
        assert labels is not None
        return self.form(outputs, F.mse_loss(outputs, labels))


FORMS = {
    "loss": lambda outputs, loss: loss,
    "outputs, loss": lambda outputs, loss: (outputs, loss),
    "loss, outputs": lambda outputs, loss: (loss, outputs, None),
    "dict": lambda outputs, loss: {"loss": loss, "logits": outputs},
    "ordered": lambda outputs, loss: OrderedDict(loss=loss, outputs=outputs),
}
INPUTS = torch.tensor([[2.0, 4.0], [6.0, 8.0], [1.0, 3.0]])
EXPECTED = INPUTS + 1


def test_loss_of_a_model_may_be_a_method_or_a_module() -> None:
    class Method(Halves):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(outputs, targets)

    for model in (Halves(nn.MSELoss()), Halves(F.mse_loss), Method()):
        loss = loss_of(model)
        assert isinstance(loss, ModelLoss)
        assert torch.equal(loss(model, INPUTS, EXPECTED), F.mse_loss(INPUTS / 2, EXPECTED))


@pytest.mark.parametrize("form", FORMS)
def test_model_that_takes_targets_returns_its_loss(form: str) -> None:
    model = Computed(FORMS[form])
    loss = loss_of(model)
    assert isinstance(loss, ReturnedLoss)
    assert torch.equal(loss(model, INPUTS, EXPECTED), F.mse_loss(INPUTS / 2, EXPECTED))
    _, outputs = loss.evaluate(model, INPUTS, EXPECTED)
    assert (outputs is None) if form == "loss" else torch.equal(outputs, INPUTS / 2)


@pytest.mark.parametrize("model", [Halves(nn.MSELoss()), Computed(FORMS["loss"])])
def test_evaluation_weights_batches_by_their_samples(model: nn.Module) -> None:
    loss = loss_of(model)
    sums: Any = [loss.evaluate(model, INPUTS[part], EXPECTED[part])[0]
            for part in (slice(2), slice(2, None))]  # fmt: skip
    mean = F.mse_loss(INPUTS / 2, EXPECTED)
    assert float(sum(sums).detach()) / (3 * loss.predictions(EXPECTED[0])) == pytest.approx(
        float(mean)
    )


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1)


INVALID: dict[str, tuple[nn.Module, str]] = {
    "per sample": (Halves(per_sample), "got a loss of shape (3,) and float32, not one number"),
    "number": (Halves(lambda outputs, targets: 1.5), "got float as the loss"),
    "integer": (Halves(lambda outputs, targets: targets.long().sum()), "shape () and int64"),
    "constant": (
        Halves(lambda outputs, targets: outputs.detach().mean()),
        "got a loss that does not depend on the weights",
    ),
    "other targets": (
        Halves(nn.CrossEntropyLoss()),
        "the loss failed for outputs of shape (3, 2) and float32 and targets of shape (3, 1)",
    ),
    "missing argument": (Halves(lambda outputs: outputs.mean()), "the loss failed for outputs of"),
    "returned per sample": (
        Computed(lambda outputs, loss: (outputs, outputs.mean(1))),
        "must return the loss, (outputs, loss) or a dict with loss and logits: got a loss of shape",
    ),
    "returned nothing": (Computed(lambda outputs, loss: {"logits": outputs}), "got NoneType"),
    "returned list": (Computed(lambda outputs, loss: [outputs, loss]), "got list as the loss"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_loss_is_a_one_line_error(case: str) -> None:
    model, problem = INVALID[case]
    targets = EXPECTED[:, :1] if case == "other targets" else EXPECTED
    with pytest.raises(UserCodeError) as caught:
        loss_of(model)(model, INPUTS, targets)
    assert problem in str(caught.value)
    assert str(caught.value).startswith("--model: ")
    assert "\n" not in str(caught.value)


def test_error_of_a_loss_names_its_line() -> None:
    class Broken(Halves):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(outputs, targets.missing)  # type: ignore[attr-defined]

    model = Broken()
    with pytest.raises(UserCodeError, match=r"no attribute 'missing' \(test_loss.py:\d+\)"):
        loss_of(model)(model, INPUTS, EXPECTED)


def test_model_with_two_losses_or_none_to_call_is_rejected() -> None:
    model = Computed(FORMS["loss"])
    model.loss = nn.MSELoss()
    with pytest.raises(
        UserCodeError, match="Computed has a loss, and its forward pass takes labels"
    ):
        loss_of(model)
    with pytest.raises(UserCodeError, match=r"Halves\.loss must be a function or module"):
        loss_of(Halves(0.5))


def dataset(problem: str = "") -> Dataset:
    split = Split(INPUTS, EXPECTED)
    return Dataset("mine:data", split, split, 2, target_problem=problem)


def test_settings_that_the_loss_ignores_are_rejected() -> None:
    for model in (Halves(nn.MSELoss()), Computed(FORMS["loss"])):
        with pytest.raises(ConfigError, match="--label-smoothing: the model has its own loss"):
            loss_of(model).check(from_mapping({"label_smoothing": 0.1}), dataset())
    with pytest.raises(ConfigError, match="--eval-views: the model returns its loss"):
        loss_of(Computed(FORMS["loss"])).check(from_mapping({"eval_views": 2}), dataset())


def test_targets_that_are_not_classes_need_a_loss_of_the_model() -> None:
    data = dataset("data 'mine:data': train_y must have an integer dtype")
    with pytest.raises(DataError, match="integer dtype; other targets need a model with its loss"):
        loss_of(Halves()).check(from_mapping({}), data)
    loss_of(Halves(nn.MSELoss())).check(from_mapping({}), data)
