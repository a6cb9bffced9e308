"""Error feedback: residuals are sent later, so training converges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.compression import CODECS, create
from paceline.compression.codec import Codec
from paceline.compression.testing import exchange_all_ranks

WORLD = 3
SHAPES = ((24, 20), (20,))
ELEMENTS = 500

with_feedback = pytest.mark.parametrize(
    ("name", "options"),
    [("int8", {"chunk": "50"}), ("topk", {"ratio": "0.05"}), ("powersgd", {"rank": "2"})],
)


def constant_gradients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(ELEMENTS, generator=generator, dtype=torch.float64) for _ in range(WORLD)]


def total_sent(codecs: list[Codec], inputs: list[Tensor], steps: int) -> Tensor:
    sent = torch.zeros_like(inputs[0])
    for _ in range(steps):
        sent += exchange_all_ranks(codecs, "b", [g.clone() for g in inputs], SHAPES).results[0]
    return sent


@with_feedback
def test_sent_plus_residual_equals_all_gradients(name: str, options: dict[str, str]) -> None:
    codecs = [create(name, options) for _ in range(WORLD)]
    inputs = constant_gradients()
    sent = total_sent(codecs, inputs, 30)
    pending = [codec.state_dict()["pending"]["b"] for codec in codecs]
    torch.testing.assert_close(sent + sum(pending), 30 * sum(inputs), rtol=0, atol=1e-9)


@with_feedback
def test_average_sent_value_converges_to_the_gradient(name: str, options: dict[str, str]) -> None:
    """The residual is bounded, so the error of the average decreases as 1 / steps."""
    inputs = constant_gradients()
    exact = torch.stack(inputs).sum(0)

    def relative_error(steps: int) -> float:
        codecs = [create(name, options) for _ in range(WORLD)]
        return float((total_sent(codecs, inputs, steps) / steps - exact).norm() / exact.norm())

    late = relative_error(200)
    assert late < 0.05
    assert late < relative_error(25) / 4


def test_int8_residual_is_below_half_a_scale() -> None:
    codecs = [create("int8", {"chunk": "50"}) for _ in range(WORLD)]
    inputs = constant_gradients()
    total_sent(codecs, inputs, 100)
    for codec, gradient in zip(codecs, inputs, strict=True):
        pending = codec.state_dict()["pending"]["b"].view(-1, 50).abs().amax(1)
        # e <= (g + e) / 254 for the largest g and e of a chunk, hence e <= g / 253.
        assert (pending <= gradient.view(-1, 50).abs().amax(1) / 253 * (1 + 1e-9)).all()


def test_topk_residual_is_within_its_contraction() -> None:
    codecs = [create("topk", {"ratio": "0.05"}) for _ in range(WORLD)]
    inputs = constant_gradients()
    total_sent(codecs, inputs, 200)
    # Dropping all but a fraction d reduces the norm by at least c = sqrt(1 - d), so the norm
    # of the residual is at most c (g + e), whose fixed point is g c / (1 - c).
    shrink = math.sqrt(1 - 0.05)
    for codec, gradient in zip(codecs, inputs, strict=True):
        pending = codec.state_dict()["pending"]["b"]
        assert float(pending.norm()) <= float(gradient.norm()) * shrink / (1 - shrink)


@pytest.mark.parametrize("name", CODECS.names())
def test_linear_regression_converges(name: str) -> None:
    """Workers with different data find the weights that one worker finds with all data."""
    generator = torch.Generator().manual_seed(7)
    truth = torch.randn(20, 16, generator=generator)
    inputs = [torch.randn(64, 20, generator=generator) + 0.3 * rank for rank in range(WORLD)]
    targets = [x @ truth for x in inputs]
    codecs = [create(name, {"ratio": "0.05"} if name == "topk" else {}) for _ in range(WORLD)]
    weights = torch.zeros(20, 16)
    everything = torch.cat(inputs)
    curvature = float(torch.linalg.eigvalsh(everything.T @ everything)[-1]) / len(everything)
    for _ in range(400):
        gradients = [
            (x.T @ (x @ weights - y) / len(everything)).flatten()
            for x, y in zip(inputs, targets, strict=True)
        ]
        average = exchange_all_ranks(codecs, "weights", gradients, ((20, 16),)).results[0]
        weights -= 0.2 / curvature * average.view(20, 16)
    assert float((weights - truth).norm() / truth.norm()) < 1e-3
