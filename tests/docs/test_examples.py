"""The examples work when run as their docstrings describe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.records import read_json
from tests.support.warm import PrewarmedStarter

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(folder: Path, *words: str) -> str:
    """Run an example, the last of `words`, in a folder; returns its output."""
    *launcher, example = words
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / example)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcome(output: str) -> tuple[float, float, int]:
    """Return accuracy, sum of the weights and number of workers."""
    found = re.search(r"accuracy (\S+), sum of weights (\S+), workers (\d+)", output)
    assert found is not None, output
    return float(found[1]), float(found[2]), int(found[3])


def test_own_loop_learns_the_same_with_one_worker_and_with_two(tmp_path: Path) -> None:
    alone = outcome(run(tmp_path, "own_loop.py"))
    together = outcome(run(tmp_path, *TORCHRUN, "own_loop.py"))
    assert (alone[2], together[2]) == (1, 2)
    assert alone[0] > 0.9
    assert together[1] == pytest.approx(alone[1], rel=1e-3)


def test_own_dataloader_is_recorded_with_its_evaluations(tmp_path: Path) -> None:
    output = run(tmp_path, *TORCHRUN, "own_dataloader.py")
    (folder,) = (tmp_path / "runs").iterdir()
    result = read_json(folder / "result.json")
    assert (result["kind"], result["status"], len(result["workers"])) == ("join", "finished", 2)
    assert result["samples"] == 20 * 500
    accuracy = result["final"]["test_accuracy"]
    assert accuracy > 0.9
    assert f"epoch 20: accuracy {accuracy:.3f}" in output
    assert main(["report", str(tmp_path / "runs")]) == 0


def train(starter: PrewarmedStarter, out: Path, *words: str) -> dict[str, object]:
    common = ["--no-tensorboard", "--quiet", "--threads", "1", "--nproc-per-node", "2"]
    command = ["-m", "paceline", "train", *common, "--out", str(out), "--name", "run", *words]
    process = starter.start(command, cwd=EXAMPLES, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return read_json(out / "run" / "result.json")


def test_own_model_learns_own_data(starter: PrewarmedStarter, tmp_path: Path) -> None:
    words = ["--model", "own_model:Wide", "--data", "own_model:rings", "--strategy", "ring"]
    result = train(starter, tmp_path, *words, "--epochs", "4", "--lr", "0.1")
    final = result["final"]
    assert isinstance(final, dict)
    assert final["test_accuracy"] > 0.9


def test_own_tokens_are_learned_from_their_file(starter: PrewarmedStarter, tmp_path: Path) -> None:
    words = ["--model", "own_tokens:Gru", "--data", "own_tokens:words", "--strategy", "ring"]
    result = train(
        starter, tmp_path, *words, "--epochs", "4", "--optimizer", "adamw", "--lr", "0.01"
    )
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    # Number, noun and verb have a bit each, and half of the articles: 3.5 bits per four words.
    assert 2 ** (3.5 / 4) * 0.97 < metrics["perplexity"] < 2 ** (3.5 / 4) * 1.05


def test_own_loss_fits_a_surface(starter: PrewarmedStarter, tmp_path: Path) -> None:
    words = ["--model", "own_loss:Regressor", "--data", "own_loss:surface", "--strategy", "ring"]
    result = train(starter, tmp_path, *words, "--optimizer", "adam", "--epochs", "5")
    final = result["final"]
    assert isinstance(final, dict)
    # The variance of the heights, halved, is 0.12.
    assert final["test_loss"] < 0.02
    assert final["test_accuracy"] is None


def test_model_that_returns_its_loss_learns_pairs_of_letters(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    words = ["--model", "returned_loss:Bigram", "--data", "stories", "--context", "64"]
    words += ["--metrics", "bits_per_byte,accuracy", "--optimizer", "adamw", "--lr", "0.1"]
    less = ["--train-samples", "2000", "--test-samples", "200", "--epochs", "2"]
    metrics = train(starter, tmp_path, *words, *less, "--strategy", "overlap")["metrics"]
    assert isinstance(metrics, dict)
    # Stories have 41 characters, 5.4 bits, of which single letters explain one.
    assert list(metrics) == ["bits_per_byte", "accuracy"]
    assert metrics["bits_per_byte"] < 3.5
    assert metrics["accuracy"] > 0.3


def test_own_metrics_are_in_the_result(starter: PrewarmedStarter, tmp_path: Path) -> None:
    words = ["--model", "own_model:Wide", "--data", "own_model:rings", "--strategy", "ring"]
    words += ["--metrics", "own_metric:f1,own_metric:confidence"]
    result = train(starter, tmp_path, *words, "--epochs", "4", "--lr", "0.1")
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    assert list(metrics) == ["accuracy", "f1", "confidence"]
    assert all(0.8 < value <= 1 for value in metrics.values())


def test_own_strategy_averages_as_often_as_its_option_says(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    words = ["--model", "own_model:Wide", "--data", "own_model:rings", "--iterations", "8"]
    result = train(
        starter, tmp_path, *words, "--strategy", "own_strategy:LateAveraging", "-o", "every=4"
    )
    workers = result["workers"]
    assert isinstance(workers, list)
    weights = 2 * 256 + 256 + 256 * 3 + 3
    # The initial broadcast, two averages in the middle and one at the end. In each of them, rank 0
    # of two sends all weights.
    assert workers[0]["traffic"]["parameters"]["bytes_sent"] == 4 * weights * 4
