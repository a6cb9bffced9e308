"""Metrics of the test set by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.analysis.validation import is_number
from paceline.config import from_mapping
from paceline.data.dataset import Dataset, Split, TokenTransform, Transform
from paceline.data.image_transforms import ImageTransform
from paceline.errors import ConfigError, UnknownNameError, UserCodeError
from paceline.training.loss import CrossEntropy, Loss, ModelLoss
from paceline.training.metrics import Metrics

OWN = ModelLoss(nn.Identity())
TOKENS, BYTES = TokenTransform(), TokenTransform(is_bytes=True)
OUTPUTS = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 0.0]])
LABELS = torch.tensor([0, 1, 1, 0])


def dataset(transform: Transform | None) -> Dataset:
    split = Split(torch.zeros(1, 1), torch.zeros(1, 1))
    return Dataset("any", split, split, 2, transform)


def metrics(
    transform: Transform | None = None, loss: Loss | None = None, **settings: Any
) -> Metrics:
    return Metrics(from_mapping(settings), dataset(transform), loss or CrossEntropy())


def values(found: Metrics, loss: float, correct: float = 1.0) -> dict[str, float | None]:
    """Return the metrics of two predictions, without metrics of the user."""
    return found.values(loss, [correct] * found.size, 2.0)


@pytest.mark.parametrize("transform", [None, ImageTransform((0.5,), (0.5,))])
def test_images_and_floats_have_accuracy(transform: ImageTransform | None) -> None:
    assert values(metrics(transform), 2.0) == {"accuracy": 0.5}


def test_tokens_have_perplexity_and_bytes_have_bits() -> None:
    loss = math.log(8)
    expected = {"accuracy": 0.5, "perplexity": pytest.approx(8)}
    assert values(metrics(TOKENS), loss) == expected
    assert values(metrics(BYTES), loss) == {**expected, "bits_per_byte": pytest.approx(3)}


def test_perplexity_that_is_too_large_for_the_records_is_none() -> None:
    for loss in (140.0, 1e4):
        assert values(metrics(TOKENS), loss)["perplexity"] is None
    assert is_number(values(metrics(TOKENS), 138.0)["perplexity"])


def test_model_with_its_own_loss_has_the_metrics_that_are_named() -> None:
    assert values(metrics(BYTES, OWN), 2.0) == {}
    named = metrics(BYTES, OWN, metrics=["bits_per_byte", "accuracy"])
    assert values(named, math.log(8)) == {"bits_per_byte": pytest.approx(3), "accuracy": 0.5}


def test_accuracy_counts_correct_predictions_of_samples_and_positions() -> None:
    assert [int(one) for one in metrics().sums(OUTPUTS, LABELS)] == [3]
    outputs, labels = OUTPUTS.view(2, 2, 2), LABELS.view(2, 2)
    assert [int(one) for one in metrics().sums(outputs, labels)] == [3]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own_metrics.py").write_text(
        "import torch\n"
        "def error(outputs, targets): return (outputs.argmax(-1) - targets).abs().float().mean()\n"
        "def precision(outputs, targets):\n"
        "    found = outputs.argmax(-1) == 1\n"
        "    return (found & (targets == 1)).sum(), found.sum()\n"
        "def constant(outputs, targets): return 3\n"
        "def infinite(outputs, targets): return torch.tensor(float('nan'))\n"
        "def text(outputs, targets): return 'high'\n"
        "def per_sample(outputs, targets): return outputs.argmax(-1)\n"
        "def half(outputs, targets): return outputs.sum(), None\n"
        "def broken(outputs, targets):\n"
        "    return outputs.missing\n"
        "def dtype(outputs, targets): return outputs.dtype == torch.float32\n"
        "def loss(outputs, targets): return 1\n"
        "def accuracy(outputs, targets): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "users_own_metrics"


def over_batches(found: Metrics, sizes: list[int]) -> dict[str, float | None]:
    totals = [0.0] * found.size
    for outputs, labels in zip(OUTPUTS.split(sizes), LABELS.split(sizes), strict=True):
        sums = found.sums(outputs, labels)
        totals = [total + float(one) for total, one in zip(totals, sums, strict=True)]
    return found.values(1.0, totals, 4.0)


@pytest.mark.parametrize("sizes", [[4], [3, 1], [1, 1, 2]])
def test_own_metrics_do_not_depend_on_the_batches(mine: str, sizes: list[int]) -> None:
    own = metrics(metrics=[f"{mine}:{name}" for name in ("error", "precision", "constant")])
    expected = {"accuracy": 0.75, "error": 0.25, "precision": 1.0, "constant": 3.0}
    assert over_batches(own, sizes) == expected


def test_metric_that_is_not_a_number_is_none(mine: str) -> None:
    assert over_batches(metrics(metrics=[f"{mine}:infinite"]), [4])["infinite"] is None
    # No sample of these is found, so the count is zero.
    none_found = metrics(metrics=[f"{mine}:precision"])
    sums = [float(one) for one in none_found.sums(OUTPUTS[:1], LABELS[:1])]
    assert none_found.values(1.0, sums, 1.0)["precision"] is None


def test_metrics_get_outputs_in_single_precision(mine: str) -> None:
    found = metrics(loss=OWN, metrics=[f"{mine}:dtype"])
    assert [float(one) for one in found.sums(OUTPUTS.bfloat16(), LABELS)] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("text", "must return a number or (sum, count), got str"),
        ("half", "must return a number or (sum, count), got NoneType"),
        ("per_sample", "must return a number or (sum, count), got Tensor of shape (4,)"),
        ("broken", "the metric failed: AttributeError: 'Tensor' object has no attribute 'missing'"
         " (users_own_metrics.py:12)"),
    ],
)  # fmt: skip
def test_invalid_metric_is_a_one_line_error(mine: str, name: str, problem: str) -> None:
    with pytest.raises(UserCodeError) as caught:
        metrics(metrics=[f"{mine}:{name}"]).sums(OUTPUTS, LABELS)
    assert str(caught.value).startswith(f"--metrics {mine}:{name}: ")
    assert problem in str(caught.value)


def test_metrics_need_outputs_that_fit(mine: str) -> None:
    with pytest.raises(UserCodeError, match=r"returns only its loss: return \(outputs, loss\)"):
        metrics(loss=OWN, metrics=[f"{mine}:error"]).sums(None, LABELS)
    problem = r"--metrics accuracy: .* needs outputs of shape \(4, classes\), got \(4,\)"
    with pytest.raises(UserCodeError, match=problem):
        metrics(loss=OWN, metrics=["accuracy"]).sums(OUTPUTS[:, 0], LABELS)


def test_unknown_and_taken_names_are_rejected(mine: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown metric 'acuracy': did you mean accuracy"):
        metrics(metrics=["acuracy"])
    for name in ("loss", "accuracy"):
        with pytest.raises(ConfigError, match=f"the name {name} is taken; rename the function"):
            metrics(metrics=[f"{mine}:{name}"])
    with pytest.raises(ConfigError, match="the name error is taken"):
        metrics(metrics=[f"{mine}:error", f"{mine}:error"])


def test_metrics_that_the_task_does_not_have_are_rejected() -> None:
    with pytest.raises(ConfigError, match="--metrics bits_per_byte: applies to text, not to any"):
        metrics(TOKENS, metrics=["bits_per_byte"])
    with pytest.raises(ConfigError, match="add --metrics accuracy or use --target-loss"):
        metrics(loss=OWN, target_accuracy=0.9)
    metrics(loss=OWN, target_accuracy=0.9, metrics=["accuracy"])
