"""Learning-rate schedules against their formulas."""

from __future__ import annotations

import math

import pytest

from paceline.config import from_mapping
from paceline.training.optimizer import learning_rate

PER_EPOCH = 10


def rates(total: int, **settings: object) -> list[float]:
    rate = learning_rate(from_mapping({"iterations": total, **settings}), PER_EPOCH)
    return [rate(iteration) for iteration in range(total)]


def test_constant_rate_does_not_change() -> None:
    assert rates(25, lr=0.3) == [0.3] * 25


def test_step_schedule_keeps_each_rate_for_its_epochs() -> None:
    got = rates(80, schedule="steps", lr_steps="1e-2:2,1e-3:1,1e-4:3")
    assert got == [1e-2] * 20 + [1e-3] * 10 + [1e-4] * 50


def test_linear_decay_starts_at_the_rate_and_ends_before_zero() -> None:
    got = rates(4, schedule="linear", lr=2.0)
    assert got == pytest.approx([2.0, 1.5, 1.0, 0.5])


def test_cosine_starts_at_the_rate_and_falls_toward_zero() -> None:
    got = rates(100, schedule="cosine", lr=1.0)
    assert got == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 100)) for i in range(100)])


def test_one_cycle_peaks_at_three_tenths() -> None:
    got = rates(100, schedule="one_cycle", lr=2.0)
    assert got[0] == pytest.approx(2.0 / 25)
    assert max(range(100), key=got.__getitem__) == 30
    assert got[30] == pytest.approx(2.0)
    assert got[99] < 0.01
    assert got[:31] == sorted(got[:31])
    assert got[30:] == sorted(got[30:], reverse=True)


def test_warmup_rises_linearly_to_the_schedule() -> None:
    got = rates(30, lr=1.0, warmup_epochs=0.5)
    assert got[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert got[5:] == [1.0] * 25


@pytest.mark.parametrize(("kind", "factor"), [("none", 1), ("linear", 8), ("sqrt", math.sqrt(8))])
def test_rate_scales_with_the_batch(kind: str, factor: float) -> None:
    got = rates(1, lr=0.1, lr_scaling=kind, batch_size=256, base_batch_size=32)
    assert got[0] == pytest.approx(0.1 * factor)
