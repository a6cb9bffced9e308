"""Branches from a checkpoint, and the check of the noise scale that they allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.analysis.branched_check import branched_check, samples_to
from paceline.analysis.run import open_run
from paceline.config import from_mapping
from paceline.errors import CheckpointError, RecordsError
from paceline.launch import launcher
from paceline.launch.branches import run_branches
from paceline.records import RunFolder

SETTINGS: dict[str, Any] = {
    "model": "softmax",
    "data": "plain_digits",
    "train_samples": 1000,
    "test_samples": 500,
    "batch_size": 64,
    "eval_every": "never",
    "lr": 0.0005,
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
}


def train(out: Path, **settings: Any) -> RunFolder:
    config = from_mapping({**SETTINGS, "out": str(out), **settings})
    outcome = launcher.train(config, quiet=True)
    assert outcome.exit_code == 0
    return outcome.folder


def test_branch_with_the_same_batch_size_is_the_run_itself(tmp_path: Path) -> None:
    # The checkpoint is in the middle of the second epoch.
    trained = train(tmp_path / "trained", iterations=24, checkpoint_every=24)
    whole = train(tmp_path / "whole", iterations=34).read_result()
    branch, larger = run_branches(
        trained.path, [64, 128], 640, tmp_path / "branches", noise_scale=64.0
    )
    result = branch.read_result()
    assert result is not None
    assert whole is not None
    assert result["iterations"] == 34
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert len(result["history"]) == 10
    # (1 + 64 / 64) / (1 + 64 / 128)
    assert larger.read_config().lr == pytest.approx(4 / 3 * 5e-4)


def test_far_below_the_best_learning_rate_scaled_rates_make_batches_equal(tmp_path: Path) -> None:
    trained = train(tmp_path, iterations=24, checkpoint_every=24)
    folders = run_branches(trained.path, [64, 128, 256], 2560, tmp_path / "branches")
    assert [folder.read_config().lr for folder in folders] == pytest.approx([5e-4, 1e-3, 2e-3])
    runs = [open_run(folder.path) for folder in folders]
    compared = branched_check(runs, 64, noise_scale=1000.0)
    assert [each.batch for each in compared] == [64, 128, 256]
    assert compared[0].relative_samples == 1
    assert all(0.7 < each.relative_samples < 1.1 for each in compared)
    assert max(each.samples for each in compared) == 2560
    assert [each.predicted_samples for each in compared] == [1, 1128 / 1064, 1256 / 1064]


def test_run_without_a_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    folder = train(tmp_path, iterations=1)
    with pytest.raises(CheckpointError, match="no checkpoint to branch from: use --checkpoint-eve"):
        run_branches(folder.path, [32], 64, tmp_path / "branches")


def test_comparison_needs_a_branch_with_the_base_batch_size(tmp_path: Path) -> None:
    run = open_run(train(tmp_path, iterations=1).path)
    with pytest.raises(RecordsError, match="no branch has the base batch size 32"):
        branched_check([run], 32)


def test_samples_to_a_loss_are_interpolated_up_to_its_first_crossing() -> None:
    samples, losses = np.array([100.0, 200.0, 300.0, 400.0]), np.array([3.0, 2.0, 2.0, 1.0])
    assert samples_to(3.5, samples, losses) == 100
    assert samples_to(2.25, samples, losses) == 175
    assert samples_to(2.0, samples, losses) == 200
    assert samples_to(1.5, samples, losses) == 350
