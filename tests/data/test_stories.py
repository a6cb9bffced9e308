"""Synthetic stories: reproducible, extendable, cached on disk, and parsed by their grammar."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunConfig
from paceline.data import stories
from paceline.data.dataset import Dataset, LoadRequest
from paceline.data.loading import load_dataset
from paceline.data.stories import STORIES, draw_text
from paceline.data.story_grammar import NOUNS, grammatical_fraction, parse

SINGULAR = {singular for singular, _ in NOUNS}
STORY = (
    "Nora had an old drum. The geese that the child follows wait. The boy near the mice runs. "
    "She took the old drum to the hill. At the hill she lost her drum.\n"
)


def text_of(split: str, size_bytes: int, seed: int = 0) -> bytes:
    return b"".join(draw_text(split, size_bytes, seed))


def load(folder: Path, **changes: Any) -> Dataset:
    settings = {"train_samples": 100, "test_samples": 50, "context": 32, **changes}
    return STORIES(LoadRequest(folder=str(folder), **settings))


@pytest.fixture
def cache_small_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache small datasets on disk as if they were large."""
    monkeypatch.setattr(stories, "_MAX_UNCACHED_BYTES", 10)


def test_every_drawn_sentence_is_grammatical() -> None:
    text = text_of("train", 200_000).decode()
    assert grammatical_fraction(text) == 1.0
    assert len(parse(text)) > 5000


def test_example_story_is_grammatical() -> None:
    assert [one.problem for one in parse(STORY)] == [None] * 5


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("follows", "follow", "child ... follow: the verb does not agree"),
        ("wait", "waits", "geese ... waits: the verb does not agree"),
        ("mice runs", "mice run", "boy ... run: the verb does not agree"),
        ("an old", "a old", "a old: the article does not agree"),
        ("She took", "He took", "expected She, found He"),
        ("the old drum", "the red drum", "expected old, found red"),
        ("lost her drum", "lost his drum", "expected her, found his"),
        ("lost her drum", "lost her kite", "expected drum, found kite"),
        ("At the hill", "At the lake", "expected hill, found lake"),
        ("The boy near", "The boy  near", "not words, single spaces and a final period"),
        ("mice runs.", "mice runs fast.", "expected the end, found fast"),
        ("The geese", "The geeze", "expected a noun, found geeze"),
        ("The geese that the child follows wait. The boy near the mice runs. ", "", "wrong place"),
    ],
)
def test_each_violation_is_found_in_its_sentence(before: str, after: str, problem: str) -> None:
    assert STORY.count(before) == 1
    found = [one.problem for one in parse(STORY.replace(before, after)) if one.problem]
    (only,) = found if after else found[:1]
    assert problem in only


def test_story_without_an_introduction_has_an_error_in_its_last_sentence_too() -> None:
    story = "The lamp. The boy near the mice runs. He took the old drum to the hill."
    endings = ("At the hill he lost his drum.", "Tom left his old drum there.")
    for ending in endings:
        *_, last = parse(f"{story} {ending}\n")
        assert "expected an introduction before" in str(last.problem)


def test_unfinished_stories_are_not_counted() -> None:
    assert grammatical_fraction(STORY + STORY[:30]) == 1.0
    assert grammatical_fraction(STORY[:30]) == 0.0
    assert grammatical_fraction("Nora had an old\n" + STORY) == 5 / 6


def test_subjects_and_verbs_are_separated_by_nouns_of_either_number() -> None:
    """The nearest noun alone must not predict the verb."""
    text = text_of("train", 200_000).decode()
    nouns = re.findall(r"The dogs \w+ the (\w+) (?:hide|jump|run|sing|sleep|wait)\.", text)
    singular = sum(noun in SINGULAR for noun in nouns)
    assert len(nouns) / 3 < singular < len(nouns) * 2 / 3


@pytest.mark.parametrize("size_bytes", [1, 1000, 150_000, 300_000])
def test_smaller_text_is_a_prefix_of_a_larger_one(size_bytes: int) -> None:
    assert text_of("train", 400_000)[:size_bytes] == text_of("train", size_bytes)


def test_splits_and_seeds_differ() -> None:
    texts = {text_of("train", 1000), text_of("test", 1000), text_of("train", 1000, seed=1)}
    assert len(texts) == 3


def test_samples_are_windows_of_the_text(tmp_path: Path) -> None:
    dataset = load(tmp_path)
    assert dataset.train.inputs.shape == (100, 32)
    assert bytes(dataset.train.inputs.flatten().tolist()) == text_of("train", 3200)
    assert bytes(dataset.test.targets.flatten().tolist()) == text_of("test", 1601)[1:]


@pytest.mark.usefixtures("cache_small_datasets")
def test_text_is_cached_and_corrupt_caches_are_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = load(tmp_path)
    (cache,) = (tmp_path / "stories").glob("*train*.txt")
    assert cache.read_bytes() == text_of("train", 3201)
    for damage in (b"", b"y" * 3201):
        cache.write_bytes(damage)
        assert torch.equal(load(tmp_path).train.inputs, drawn.train.inputs)
    mapped = load(tmp_path, resident_limit_bytes=0)
    assert torch.equal(mapped.train.targets, drawn.train.targets)


@pytest.mark.usefixtures("cache_small_datasets")
def test_text_that_fits_in_memory_does_not_need_its_cache(tmp_path: Path) -> None:
    (tmp_path / "stories").touch()
    assert len(load(tmp_path).train) == 100


def test_run_seed_does_not_change_the_text() -> None:
    one, other = (
        load_dataset(RunConfig(data="stories", train_samples=70, test_samples=1, seed=seed))
        for seed in (0, 1)
    )
    assert torch.equal(one.train.inputs, other.train.inputs)
