"""The estimate of the gradient noise scale, on synthetic gradients whose noise scale is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.measure.gradient_noise import GradientNoise, sum_of_squares
from paceline.measure.noise_scale import (
    SAMPLE_KEYS,
    NoiseSample,
    estimate,
    learning_rate_factor,
    read_noise_samples,
)

WEIGHTS = 50
SQUARE, VARIANCE = 4.0, 240.0
"""Squared norm of the gradient, and variance of the gradient of a sample over all weights."""
GRADIENT = math.sqrt(SQUARE / WEIGHTS) * torch.ones(WEIGHTS, dtype=torch.float64)


def noisy_gradients(shards: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """The gradients of ranks, each weighted by its fraction of the samples."""
    deviation = math.sqrt(VARIANCE / WEIGHTS)
    noise = torch.randn(sum(shards), WEIGHTS, generator=generator, dtype=torch.float64)
    samples = GRADIENT + deviation * noise
    return torch.stack([part.sum(0) for part in samples.split(list(shards))]) / sum(shards)


def measure(shards: Sequence[int], steps: int, seed: int = 0) -> list[NoiseSample]:
    """Measure synthetic gradients as ranks do, each with its own meter."""
    generator = torch.Generator().manual_seed(seed)
    ranks = [GradientNoise(every=1) for _ in shards]
    for step in range(steps):
        gradients = noisy_gradients(shards, generator)
        for rank, (noise, samples, own) in enumerate(zip(ranks, shards, gradients, strict=True)):
            assert noise.begin_step(step, samples, sum(shards))
            noise.add_own([own])
            # Each rank has a shard of the sum.
            noise.add_summed([gradients.sum(0).chunk(len(shards))[rank]])
            noise.end_step()
    table = torch.stack([noise.take() for noise in ranks])
    for noise in ranks:
        noise.add_table(table)
    assert all(noise.samples == ranks[0].samples for noise in ranks)
    return list(ranks[0].samples)


@pytest.mark.parametrize("shards", [(8, 8), (4, 4, 4, 4), (12, 3, 1), (10, 0, 6)])
def test_estimates_are_unbiased_for_equal_and_unequal_shards(shards: tuple[int, ...]) -> None:
    samples = measure(shards, steps=500)
    for values, expected in (
        ([sample.variance for sample in samples], VARIANCE),
        ([sample.gradient_square for sample in samples], SQUARE),
    ):
        error = np.std(values) / math.sqrt(len(values))
        assert abs(np.mean(values) - expected) < 4 * error
        assert error < 0.2 * expected


def test_the_noise_scale_approaches_its_true_value() -> None:
    found = estimate(measure((8, 8), steps=500), decay=1.0)
    assert found is not None
    assert found.value == pytest.approx(VARIANCE / SQUARE, rel=0.2)
    assert (found.batch, found.small_batch, found.measurements) == (16, 8, 500)


def test_about_95_of_100_intervals_contain_the_true_value() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        variances = generator.normal(60, 20, 300)
        squares = 1 + 0.02 * (variances - 60) + generator.normal(0, 3, 300)
        samples = [
            _sample(step, *pair) for step, pair in enumerate(zip(variances, squares, strict=True))
        ]
        found = estimate(samples)
        assert found is not None
        assert found.low is not None
        hits += found.low <= 60 <= (math.inf if found.high is None else found.high)
    assert 0.9 * 200 <= hits <= 0.99 * 200


def _sample(iteration: int, variance: float, gradient_square: float) -> NoiseSample:
    """A sample with these estimates, of batches of 8 and 16."""
    return NoiseSample(
        iteration, 8.0, 16.0, gradient_square + variance / 8, gradient_square + variance / 16
    )


def test_recent_steps_weigh_more() -> None:
    samples = [_sample(step, 10.0 if step < 600 else 90.0, 1.0) for step in range(1200)]
    found = estimate(samples)
    assert found is not None
    assert found.value == pytest.approx(90, rel=0.01)


def test_interval_has_no_upper_end_if_the_gradient_may_be_all_noise() -> None:
    generator = np.random.default_rng(0)
    samples = [_sample(step, 60.0, generator.normal(0, 3)) for step in range(100)]
    found = estimate(samples)
    assert found is not None
    assert found.high is None
    assert found.low is not None
    assert found.low > 0


def test_intervals_contain_the_estimate() -> None:
    generator = np.random.default_rng(1)
    unbounded = 0
    for _ in range(2000):
        # Noisy enough that numerator and denominator may both be zero.
        pairs = generator.normal(1, 6, (20, 2)) @ generator.normal(0, 1, (2, 2))
        found = estimate([_sample(step, *pair) for step, pair in enumerate(pairs.tolist())])
        assert found is not None
        assert found.low is not None
        if found.value:
            assert found.low <= found.value <= (math.inf if found.high is None else found.high)
            unbounded += found.high is None
    assert unbounded > 200


def test_norms_are_unscaled_if_only_squares_are_added() -> None:
    noise = GradientNoise(every=1, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    noise.begin_step(0, 1, 2)
    noise.add_own_square(torch.tensor(32.0))
    noise.add_summed([torch.tensor([4.0])])
    noise.end_step()
    # Of the gradient of the mean loss over the samples of this rank, of which there is one of two.
    assert noise.take().tolist() == [32 / 4**2 * 2**2, 1, 1]


def test_few_measurements_have_no_interval() -> None:
    found = estimate([_sample(0, 60.0, 1.0), _sample(1, 60.0, 1.0)])
    assert found is not None
    assert found.value == pytest.approx(60)
    assert (found.low, found.high) == (None, None)
    assert estimate([]) is None


def test_gradients_that_overflowed_are_left_out() -> None:
    noise = GradientNoise(every=1)
    for step, value in enumerate((1.0, math.inf, 2.0)):
        noise.begin_step(step, 1, 2)
        noise.add_own([torch.tensor([value])])
        noise.add_summed([torch.tensor([value])])
        noise.end_step()
    noise.add_table(noise.take()[None])
    assert [sample.iteration for sample in noise.samples] == [0, 2]


def test_norms_are_those_of_unscaled_gradients() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    noise = GradientNoise(every=1, scaler=scaler)
    noise.begin_step(0, 1, 2)
    noise.add_own([torch.tensor([16.0])])
    noise.add_summed([torch.tensor([32.0])])
    # The update may change the scale.
    scaler.update(new_scale=2.0)
    noise.end_step()
    noise.add_table(noise.take()[None])
    assert [(each.small_square, each.square) for each in noise.samples] == [(4.0, 4.0)]


def test_only_every_nth_step_is_measured() -> None:
    noise = GradientNoise(every=3)
    assert [noise.begin_step(step, 1, 2) for step in range(6)] == [False, False, True] * 2
    assert not any(GradientNoise().begin_step(step, 1, 2) for step in range(6))


def test_sum_of_squares_covers_all_layouts_and_types() -> None:
    dense = torch.arange(6.0).view(2, 3)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
    )
    parts = [dense, dense.t(), dense.bfloat16(), sparse]
    assert float(sum_of_squares(parts)) == pytest.approx(3 * 55 + 9)
    assert float(sum_of_squares([*parts, dense.double()])) == pytest.approx(4 * 55 + 9)
    assert float(sum_of_squares([dense.view(-1)])) == 55


def test_samples_are_read_from_events_without_repeats_and_damage(tmp_path: Path) -> None:
    def event(*iterations: int, square: object = 1.0) -> dict[str, object]:
        values = [(step, 8.0, 16.0, 2.0, square) for step in iterations]
        columns = map(list, zip(*values, strict=True))
        return {"event": "gradient_noise", **dict(zip(SAMPLE_KEYS, columns, strict=True))}

    file = tmp_path / "events-0.jsonl"
    damaged = {**event(50), "batch": "sixteen"}
    events = [
        event(9, 19, 29),
        damaged,
        event(39),
        event(19, 29, square=3.0),
        event(39, square="x"),
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in events))
    found = read_noise_samples(file)
    assert [(each.iteration, each.square) for each in found] == [(9, 1.0), (19, 3.0), (29, 3.0)]
    assert [each.iteration for each in read_noise_samples(file, until=29)] == [9, 19]
    assert read_noise_samples(tmp_path / "missing") == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_learning_rate_is_scaled_up_to_the_noise_scale(optimizer: str) -> None:
    """Linear in the batch size far below, constant far above; square roots for Adam."""
    power = 1.0 if optimizer == "sgd" else 0.5
    assert learning_rate_factor(64, 64, 100.0, optimizer) == 1
    assert learning_rate_factor(128, 64, 1e9, optimizer) == pytest.approx(2**power)
    assert learning_rate_factor(128, 64, math.inf, optimizer) == 2**power
    assert learning_rate_factor(128, 64, 0.0, optimizer) == 1
    assert learning_rate_factor(300, 100, 100.0, optimizer) == pytest.approx(1.5**power)
