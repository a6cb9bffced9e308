"""`paceline generate` and `paceline.generate`: text from the newest checkpoint of a run."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.cli import main
from paceline.models.build import build_model
from paceline.training.checkpoint import iterations, state_file
from paceline.training.generation import ModelScores, Utf8, sample_tokens
from tests.support.user_code import Samples

TEXT = "abcdefgh\n"
SMALL: dict[str, Any] = {
    "batch_size": 16,
    "threads": 1,
    "sample_seconds": 0,
    "tensorboard": False,
    "eval_every": "never",
}
VOCABULARY = 7


def counting() -> tuple[Samples, Samples, int]:
    """Tokens that are no text: each is the next number."""
    stream = torch.arange(64 * 8 + 1) % VOCABULARY
    split = stream[:-1].view(64, 8), stream[1:].view(64, 8)
    return split, (split[0][:8], split[1][:8]), VOCABULARY


class LikeNanoGpt(nn.Module):
    """Returns logits and loss; without targets, the logits of the last position only."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(classes, classes)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.scores(tokens)
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LikeHuggingFace(LikeNanoGpt):
    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        logits, loss = super().forward(tokens, labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("model", ["LikeNanoGpt", "LikeHuggingFace"])
def test_model_that_returns_its_loss_generates_text(runs: Path, model: str) -> None:
    pieces = paceline.generate(runs / model, "abc", tokens=6, temperature=0)
    assert "".join(pieces) == "defgh\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that learned to repeat a text and to count, and one on images."""
    out = tmp_path_factory.mktemp("runs")
    (out / "text.txt").write_text(TEXT * 200)
    learning = {
        **SMALL,
        "model": "gpt-nano",
        "optimizer": "adamw",
        "lr": 0.01,
        "iterations": 60,
        "out": str(out),
        "checkpoint_every": 20,
    }
    text = {"data": f"text:{out / 'text.txt'}", "context": 12}
    numbers = {"data": f"{__name__}:counting"}
    images = {"model": "lenet", "data": "digits", "train_samples": 32, "test_samples": 16}
    returning = ("LikeNanoGpt", "LikeHuggingFace")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("text", text),
        ("numbers", numbers),
        ("without", {**text, "iterations": 1, "checkpoint_every": "never"}),
        ("images", {**images, "iterations": 1, "checkpoint_every": 1}),
        *((name, {**text, "model": f"{__name__}:{name}", "lr": 0.1}) for name in returning),
    ]
    for name, settings in cases:
        result = paceline.train(**{**learning, **settings, "name": name})
        assert result["status"] == "finished"
    # The path of the text is not needed any more.
    (out / "text.txt").unlink()
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert not captured.out
    return line


def test_command_prints_the_prompt_and_its_continuation(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompt", "abc", "--tokens", "20", "--temperature", "0"]
    assert main(["generate", str(runs / "text"), *arguments]) == 0
    assert capsys.readouterr().out == (TEXT * 3)[:23] + "\n"


def test_python_function_yields_pieces_of_the_continuation(runs: Path) -> None:
    pieces = list(paceline.generate(runs / "text", "efgh", tokens=6, temperature=0))
    assert pieces == ["\n", "a", "b", "c", "d", "e"]


def test_prompt_may_be_longer_than_the_context(runs: Path) -> None:
    pieces = paceline.generate(runs / "text", TEXT * 9, tokens=8, temperature=0.1)
    assert "".join(pieces) == TEXT[:8]


def test_tokens_that_are_no_text_are_numbers(runs: Path) -> None:
    pieces = paceline.generate(runs / "numbers", "3 4", tokens=5, temperature=0)
    assert "".join(pieces) == " 5 6 0 1 2"


def test_same_seed_gives_the_same_text(runs: Path) -> None:
    def text(seed: int) -> str:
        return "".join(paceline.generate(runs / "text", "a", 60, temperature=3.0, seed=seed))

    assert text(1) == text(1) != text(2)


def test_newest_intact_checkpoint_is_used(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(runs / "text", tmp_path / "run")
    newest, _ = iterations(run / "checkpoints")
    state_file(run / "checkpoints", newest).write_bytes(b"damaged")
    assert main(["generate", str(run), "--tokens", "1"]) == 0
    assert f"checkpoint of iteration {newest} was skipped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "arguments", "line"),
    [
        ("without", [], "without has no checkpoint: train for at least one epoch with"
         " --checkpoint-every epoch, or with a number of steps that divides --iterations"),
        ("images", [], "images is not a language model: its data is digits, not text or tokens"),
        ("nowhere", [], "nowhere is not a run: it has no config.json"),
        ("text", ["--prompt", ""], "--prompt: must contain at least one token"),
        ("text", ["--tokens", "0"], "--tokens: must be at least 1, got '0'"),
        ("text", ["--tokens", "many"], "--tokens: must be a whole number, got 'many'"),
        ("text", ["--temperature", "-1"], "--temperature: must be at least 0, got '-1'"),
        ("text", ["--temperature", "nan"], "--temperature: must be a finite number, got 'nan'"),
        ("text", ["--top-k", "0"], "--top-k: must be at least 1, got '0'"),
        ("text", ["--seed", "x"], "--seed: must be a whole number, got 'x'"),
        ("numbers", ["--prompt", "2 7"],
         "--prompt: token 7 is not in the vocabulary of 7 tokens"),
        ("numbers", [], "--prompt: must be token numbers separated by spaces, because the data of"
         " the run is not text, such as --prompt 0"),
        ("numbers", ["--prompt", "abc"], "--prompt: must be token numbers separated by spaces,"
         " because the data of the run is not text, got 'abc'"),
    ],
)  # fmt: skip
def test_invalid_usage_is_one_line(
    runs: Path, capsys: pytest.CaptureFixture[str], run: str, arguments: list[str], line: str
) -> None:
    assert refused(capsys, str(runs / run), *arguments).endswith(line)


def test_terminal_cannot_be_controlled(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(runs / "text"), "--prompt", "\x1b[2Ja", "--tokens", "1"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_characters_are_yielded_when_complete() -> None:
    encoding = Utf8()
    assert list(encoding.decode(encoding.encode("aé€"))) == ["a", "é", "€"]
    assert list(encoding.decode([0xE2, 0x82])) == ["\N{REPLACEMENT CHARACTER}"]


# Sampling


def drawn(logits: list[float], **settings: Any) -> Counter[int]:
    def scores(tokens: list[int]) -> Tensor:
        return torch.tensor(logits)

    return Counter(sample_tokens(scores, [0], 2000, context=4, **settings))


def test_tokens_are_drawn_with_their_probabilities() -> None:
    counts = drawn(torch.tensor([0.1, 0.2, 0.7]).log().tolist())
    assert [round(counts[token] / 2000, 1) for token in range(3)] == [0.1, 0.2, 0.7]


def test_temperature_changes_the_probabilities() -> None:
    logits = torch.tensor([0.1, 0.2, 0.7]).log().tolist()
    # Squares of the probabilities, in proportion.
    counts = drawn(logits, temperature=0.5)
    assert [round(counts[token] / 2000, 1) for token in range(3)] == [0.0, 0.1, 0.9]
    assert set(drawn(logits, temperature=0)) == {2}
    assert set(drawn(logits, temperature=1e-300)) == {2}


def test_only_the_most_probable_tokens_are_drawn() -> None:
    logits = [0.3, 0.1, 0.2, 0.0]
    assert set(drawn(logits, top_k=2)) == {0, 2}
    assert set(drawn(logits, top_k=9)) == {0, 1, 2, 3}


def test_model_sees_the_last_tokens_of_the_context() -> None:
    seen = []

    def scores(tokens: list[int]) -> Tensor:
        seen.append(tokens)
        return torch.tensor([0.0, 0.0, 1.0])

    assert list(sample_tokens(scores, [0, 1, 0], 3, context=4, temperature=0)) == [2, 2, 2]
    assert seen == [[0, 1, 0], [0, 1, 0, 2], [1, 0, 2, 2]]


def test_oldest_eighth_of_a_full_context_is_dropped_at_once() -> None:
    lengths = []

    def scores(tokens: list[int]) -> Tensor:
        lengths.append(len(tokens))
        return torch.tensor([0.0, 1.0])

    list(sample_tokens(scores, [0] * 15, 6, context=16))
    assert lengths == [15, 16, 15, 16, 15, 16]


def test_cached_scores_equal_those_of_all_tokens() -> None:
    model = build_model("gpt-nano", (16,), VOCABULARY, seed=0, has_tokens=True).double()
    cached = ModelScores("gpt-nano", model)
    sequences: list[list[int]] = []

    def scores(tokens: list[int]) -> Tensor:
        sequences.append(tokens)
        found = cached(tokens)
        torch.testing.assert_close(found, model(torch.tensor([tokens]))[0, -1], rtol=0, atol=1e-12)
        return found

    list(sample_tokens(scores, [1, 2, 3], 40, context=16))
    assert max(map(len, sequences)) == 16
    assert sequences[-1][:2] != sequences[0][:2]


def test_cache_is_used_for_the_tokens_that_follow() -> None:
    model = build_model("gpt-nano", (16,), VOCABULARY, seed=0, has_tokens=True)
    lengths = []
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    scores = ModelScores("gpt-nano", model)
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 3, 4], [2, 3, 4, 5]):
        scores(tokens)
    assert lengths == [2, 1, 1, 3, 1]
