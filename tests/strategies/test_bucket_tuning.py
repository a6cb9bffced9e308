"""Tuning of the bucket size: predictions, the choice, and runs that must not depend on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm import in_process
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.strategies import create_strategy
from paceline.strategies.bucket_layout import DEFAULT_MIB, MIB, ONE_BUCKET_MIB
from paceline.strategies.bucket_tuning import (
    ROUNDS,
    Measurements,
    StepTimes,
    choose,
    measurements_of,
    predict,
)
from paceline.strategies.strategy import Strategy
from tests.support import odd_shapes as odd
from tests.support import toy_replicas as toy

STEPS = 1 + 2 * ROUNDS
"""The first one determines the order of the gradients, the others are measured."""
MEASURED = Measurements(
    backward_seconds=8.0,
    ready_seconds=[2.0, 4.0, 6.0, 8.0],
    copy_seconds_per_byte=0.0,
    latency_seconds=0.5,
    seconds_per_byte=1.0,
    overlapped_seconds_per_byte=2.0,
    one_bucket_seconds=[20.0] * ROUNDS,
    default_seconds=[10.0] * ROUNDS,
)
SIZES = [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("layout", "seconds"),
    [
        # Ready at 8, latency of 0.5, 4 bytes at full speed.
        ([[0, 1, 2, 3]], 8 + 0.5 + 4),
        # The first two end at 4 + 0.5 + 4 / 2: after 8, the last two begin.
        ([[0, 1], [2, 3]], 4 + 0.5 + 3.5 + 0.25 + 0.5 + 2),
        # 2 to 4.5, to 7, then 0.5 of latency and 0.5 s at half speed, the rest and the last one.
        ([[0], [1], [2], [3]], 8 + 0.75 + 1.5),
    ],
)
def test_prediction_simulates_the_link(layout: list[list[int]], seconds: float) -> None:
    assert predict(MEASURED, SIZES, layout) == pytest.approx(seconds)


def test_prediction_includes_copies_of_small_gradients() -> None:
    measured = replace(MEASURED, copy_seconds_per_byte=0.25)
    assert predict(measured, SIZES, [[0, 1], [2], [3]]) == pytest.approx(
        predict(MEASURED, SIZES, [[0, 1], [2], [3]]) + 2 * 0.25
    )


def test_measurements_separate_the_link_alone_from_the_overlapped_link() -> None:
    one = StepTimes(10.0, 2.0, [4.0, 10.0], [(8, 10.0, 15.0)])
    several = StepTimes(11.0, 0.0, [4.0, 11.0], [(2, 4.0, 9.0), (2, 5.0, 10.0), (4, 11.0, 14.0)])
    measured = measurements_of([one] * ROUNDS, [several] * ROUNDS, latency_seconds=1.0)
    assert measured == Measurements(
        backward_seconds=11.0,
        ready_seconds=[4.0, 11.0],
        copy_seconds_per_byte=2 / 8,
        latency_seconds=1.0,
        seconds_per_byte=(5 - 1) / 8,
        # The second one waits for the first until 9: a latency is all it takes.
        overlapped_seconds_per_byte=(5 - 1) / 4,
        one_bucket_seconds=[15.0] * ROUNDS,
        default_seconds=[14.0] * ROUNDS,
    )


def test_ranks_are_merged_by_the_slowest() -> None:
    late = replace(
        MEASURED, ready_seconds=[1.0, 5.0, 6.0, 9.0], backward_seconds=9.0, latency_seconds=0.4
    )
    merged = Measurements.merge([MEASURED, late])
    assert merged.backward_seconds == 9.0
    assert merged.ready_seconds == [2.0, 5.0, 6.0, 9.0]
    assert merged.latency_seconds == 0.4


def gradients(count: int, mib: float) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(round(mib * MIB / 4))) for _ in range(count)]


def measured_for(count: int, **changes: Any) -> Measurements:
    """Gradients are ready every 10 ms; the link needs 1 ms for each MiB."""
    plain = Measurements(
        backward_seconds=0.01 * count,
        ready_seconds=[0.01 * (position + 1) for position in range(count)],
        copy_seconds_per_byte=0.0,
        latency_seconds=0.0,
        seconds_per_byte=0.001 / MIB,
        overlapped_seconds_per_byte=0.001 / MIB,
        one_bucket_seconds=[1.0] * ROUNDS,
        default_seconds=[1.0] * ROUNDS,
    )
    return replace(plain, **changes)


def test_default_size_stays_without_a_clear_gain() -> None:
    assert choose(measured_for(16), gradients(16, 1.0), 1.0).bucket_mib == DEFAULT_MIB


def test_slow_link_gets_small_buckets() -> None:
    """A link that needs as long as the backward pass must not be idle at its start or end."""
    slow = measured_for(16, seconds_per_byte=0.02 / MIB, overlapped_seconds_per_byte=0.02 / MIB)
    choice = choose(slow, gradients(16, 0.5), 0.5)
    assert choice.bucket_mib == 0.5
    assert "faster than 2 MiB" in choice.reason


def test_high_latency_gets_large_buckets() -> None:
    assert choose(measured_for(16, latency_seconds=0.1), gradients(16, 1.0), 1.0).bucket_mib > 4


def test_one_bucket_is_chosen_only_if_it_was_always_faster() -> None:
    weights = gradients(16, 1.0)
    always = measured_for(16, one_bucket_seconds=[0.9, 0.9, 0.9])
    assert choose(always, weights, 1.0).bucket_mib == ONE_BUCKET_MIB
    mostly = measured_for(16, one_bucket_seconds=[0.5, 0.5, 1.0])
    assert choose(mostly, weights, 1.0).bucket_mib == DEFAULT_MIB


def layers() -> nn.Module:
    built = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(3)))
    generator = torch.Generator().manual_seed(0)
    for weight in built.parameters():
        nn.init.normal_(weight, std=0.05, generator=generator)
    return built


def train(strategy: Strategy, steps: range) -> None:
    replica = strategy.replica
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + replica.communicator.rank)
        inputs = torch.randn(4, 400, generator=generator)
        strategy.backward(replica.forward(inputs).pow(2).mean() / replica.communicator.world_size)
        strategy.step()


def overlap(
    communicator: Communicator, bucket_mib: str, state: dict[str, Any] | None = None
) -> Strategy:
    replica = odd.build(communicator, toy.sgd(), layers())
    strategy = odd.attached(create_strategy("overlap", {"bucket_mib": bucket_mib}), replica)
    if state is not None:
        strategy.load_state_dict(state)
    return strategy


def buckets(strategy: Strategy) -> dict[str, Any]:
    assert strategy.meter is not None
    recorded: dict[str, Any] = json.loads(json.dumps(strategy.meter.summary()))["buckets"]
    return recorded


def ranks(world_size: int, bucket_mib: str) -> list[tuple[Tensor, dict[str, Any]]]:
    def work(communicator: Communicator) -> tuple[Tensor, dict[str, Any]]:
        strategy = overlap(communicator, bucket_mib)
        train(strategy, range(STEPS + 2))
        strategy.finish()
        return odd.weights_of(strategy), buckets(strategy)

    return in_process.run(world_size, work)


def test_tuning_does_not_change_the_weights_of_two_workers() -> None:
    fixed = ranks(2, "0.5")
    for weights, recorded in ranks(2, "auto"):
        assert torch.equal(weights, fixed[0][0])
        assert len(recorded["measurements"]["one_bucket_seconds"]) == ROUNDS
    assert fixed[0][1]["reason"] == "set by -o bucket_mib"
    assert fixed[0][1]["bytes"] == [400 * 400 * 4] * 3


def test_all_ranks_choose_the_same_size() -> None:
    recorded = [buckets for _, buckets in ranks(3, "measured")]
    assert recorded == [recorded[0]] * 3
    assert "2" in recorded[0]["predicted_seconds"]


def test_size_is_not_tuned_if_rounding_depends_on_it() -> None:
    for _, recorded in ranks(3, "auto"):
        assert recorded["bucket_mib"] == DEFAULT_MIB
        assert recorded["measurements"] is None
        assert "rounding" in recorded["reason"]


def states(
    world_size: int, bucket_mib: str, steps: int, change: Callable[[dict[str, Any]], Any]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Buckets before a checkpoint after some steps, and after loading a changed copy of it."""

    def work(communicator: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        strategy = overlap(communicator, bucket_mib)
        train(strategy, range(steps))
        before, state = buckets(strategy), strategy.state_dict()
        strategy.finish()
        change(state)
        resumed = overlap(communicator, bucket_mib, state)
        train(resumed, range(1))
        resumed.finish()
        return before, buckets(resumed)

    return in_process.run(world_size, work)


def test_resumed_run_keeps_its_measured_buckets() -> None:
    for before, after in states(3, "measured", STEPS, lambda _: None):
        assert after["bytes"] == before["bytes"]
        assert after["reason"] == "as before the run was resumed"


def test_checkpoint_during_the_measurement_is_measured_anew() -> None:
    for _, after in states(3, "measured", STEPS - 1, lambda _: None):
        assert after["reason"] == "not measured yet"


def test_own_size_replaces_that_of_a_checkpoint() -> None:
    for before, after in states(3, "0.5", 1, lambda state: state.update(bucket_mib=1.0)):
        assert after["bytes"] == before["bytes"]
        assert after["reason"] == "set by -o bucket_mib"


@pytest.mark.parametrize("bucket_mib", ["auto", "1"])
def test_checkpoint_of_an_older_version_keeps_its_buckets(bucket_mib: str) -> None:
    """They ended only when full, so a large gradient joined the small ones before it."""

    def older(state: dict[str, Any]) -> None:
        del state["buckets"]
        state["bucket_mib"] = 1.0

    for _, after in states(3, bucket_mib, 1, older):
        assert after["bytes"] == [400 * 400 * 4 * 2, 400 * 400 * 4]


def test_invalid_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a number, auto or measured, got 'large'"):
        create_strategy("overlap", {"bucket_mib": "large"})
