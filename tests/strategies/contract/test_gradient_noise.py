"""Every synchronous strategy measures the same norms of gradients, and training does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.measure.noise_scale import NoiseSample, read_noise_samples
from paceline.strategies import STRATEGIES
from tests.strategies.contract.harness import takes
from tests.strategies.contract.real_runs import Run, run
from tests.strategies.contract.test_strategies import keeps_equal
from tests.support.worker_pool import WorkerPool

TASK: dict[str, Any] = {
    "model": "mlp",
    "data": "digits",
    "train_samples": 96,
    "batch_size": 32,
    "iterations": 4,
    "lr": 0.05,
}
"""The last batch of each epoch is as large as the others."""
SYNCHRONOUS = [name for name in STRATEGIES.names() if keeps_equal(name) and takes(name, 2)]
OTHERS: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in STRATEGIES.names() if not keeps_equal(name)),
    ("parameter_server", {"mode": "async"}),
]

CLIPPED = {"clip_norm": 0.5}
LARGE = {"batch_size": 512, "train_samples": 512}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in SYNCHRONOUS},
    "overlap, buckets": ("overlap", {"options": {"bucket_mib": "0.2"}}, {}),
    "ddp, accumulated": ("ddp", {"accumulate": 2}, {}),
    "fsdp, accumulated": ("fsdp", {"accumulate": 2}, {}),
    "sharded, clipped": ("sharded", {}, CLIPPED),
    "parameter_server, clipped": ("parameter_server", {}, CLIPPED),
    "two servers, clipped": ("parameter_server", {"options": {"servers": "2"}}, CLIPPED),
    "shared, small model": ("shared", {}, {"model": "lenet"}),
    "shared, more than the factors hold": ("shared", {"accumulate": 2}, LARGE),
    "fsdp, shares": ("fsdp", {}, {"shares": ["3", "1"]}),
    "overlap, int8": ("overlap", {"options": {"codec": "int8"}}, {}),
    "ddp, bf16": ("ddp", {"options": {"codec": "bf16"}}, {}),
}
"""Strategy, settings that do not change gradients, and settings that do."""
ROUNDED = {"overlap, int8": 0.05, "ddp, bf16": 0.05}
"""Tolerance of codecs that round."""


def trained(pool: WorkerPool, folder: Path, workers: int = 2, **settings: Any) -> list[Run]:
    return run(pool, workers, folder, **{**TASK, **settings})


@pytest.fixture(scope="module")
def references() -> dict[str, list[NoiseSample]]:
    """Samples of `allreduce`, by settings."""
    return {}


def samples_of(folder: Path, runs: list[Run]) -> list[NoiseSample]:
    """The recorded samples, of which the report of rank 0 counts as many."""
    (events,) = folder.rglob("events-0.jsonl")
    samples = read_noise_samples(events)
    summary = runs[0].report.worker["noise_scale"]
    assert (summary["reason"], summary["measurements"]) == (None, len(samples))
    return samples


@pytest.mark.parametrize("label", CASES)
def test_strategies_measure_the_same_norms_and_train_the_same_bits(
    pool: WorkerPool, tmp_path: Path, label: str, references: dict[str, list[NoiseSample]]
) -> None:
    strategy, settings, task = CASES[label]
    settings = {"strategy": strategy, **settings, **task}
    plain = trained(pool, tmp_path / "plain", noise_every="never", **settings)
    runs = trained(pool, tmp_path / "measured", noise_every=1, **settings)
    assert [one.report.weights_sha256 for one in runs] == [
        one.report.weights_sha256 for one in plain
    ]
    if (key := str(task)) not in references:
        path = tmp_path / "reference"
        allreduce = trained(pool, path, strategy="allreduce", noise_every=1, **task)
        references[key] = samples_of(path, allreduce)
    samples = samples_of(tmp_path / "measured", runs)
    assert [each.iteration for each in samples] == [0, 1, 2, 3]
    tolerance = ROUNDED.get(label, 1e-3)
    for own, other in zip(samples, references[key], strict=True):
        assert (own.batch, own.small_batch) == (other.batch, other.small_batch)
        assert own.small_square == pytest.approx(other.small_square, rel=tolerance)
        assert own.square == pytest.approx(other.square, rel=tolerance)
        assert own.small_square > own.square > 0


@pytest.mark.parametrize(("strategy", "accumulate"), [("single", 4), ("overlap", 2), ("fsdp", 3)])
def test_one_worker_measures_its_first_microbatch(
    pool: WorkerPool, tmp_path: Path, strategy: str, accumulate: int
) -> None:
    task = {"strategy": strategy, "accumulate": accumulate}
    plain = trained(pool, tmp_path / "plain", 1, noise_every="never", **task)
    runs = trained(pool, tmp_path / "measured", 1, noise_every=2, **task)
    assert runs[0].report.weights_sha256 == plain[0].report.weights_sha256
    samples = samples_of(tmp_path / "measured", runs)
    assert [each.iteration for each in samples] == [1, 3]
    assert {(each.small_batch, each.batch) for each in samples} == {(-(-32 // accumulate), 32)}
    assert all(each.small_square > each.square > 0 for each in samples)


@pytest.mark.parametrize(("strategy", "options"), OTHERS)
def test_strategies_that_do_not_average_gradients_say_so(
    pool: WorkerPool, tmp_path: Path, strategy: str, options: dict[str, str]
) -> None:
    (first, _) = trained(pool, tmp_path, strategy=strategy, options=options, noise_every=1)
    assert first.report.worker["noise_scale"] == {
        "every": 0,
        "reason": "workers do not average their gradients in each step",
    }


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_codecs_that_change_the_norm_say_so(pool: WorkerPool, tmp_path: Path, codec: str) -> None:
    (first, _) = trained(
        pool, tmp_path, strategy="overlap", noise_every=1, options={"codec": codec}
    )
    reason = first.report.worker["noise_scale"]["reason"]
    assert reason == "the codec changes the norm of the averaged gradient"


def test_one_worker_without_accumulation_says_why_nothing_is_measured(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (only,) = trained(pool, tmp_path, 1)
    reason = only.report.worker["noise_scale"]["reason"]
    assert (
        reason == "one worker without gradient accumulation has no smaller batches to compare with"
    )
