"""Text as byte tokens: windows, split by position, and one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunConfig
from paceline.data import text
from paceline.data.dataset import LoadRequest, TokenTransform
from paceline.data.loading import load_dataset
from paceline.data.text import load_text, windows
from paceline.errors import ConfigError, DataError, UnknownNameError

POEM = bytes(range(32, 127)) * 10 + "Größe: 3 €\n".encode()


def load(path: Path, **changes: Any) -> Any:
    return load_text(LoadRequest(path=str(path), **changes))


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_bytes(POEM)
    return path


@pytest.mark.parametrize(("length", "samples"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_windows_are_views_whose_targets_are_the_next_tokens(length: int, samples: int) -> None:
    tokens = torch.arange(length)
    split = windows(tokens, 4)
    assert split.inputs.shape == split.targets.shape == (samples, 4)
    assert torch.equal(split.targets, split.inputs + 1)
    assert split.inputs.flatten().tolist() == list(range(4 * samples))
    if samples:
        assert split.inputs.data_ptr() == tokens.data_ptr()


def test_the_end_of_the_text_is_the_test_set(poem: Path) -> None:
    dataset = load(poem, context=10, text_test_fraction=0.25)
    cut = len(POEM) - round(len(POEM) / 4)
    assert bytes(dataset.train.inputs.flatten().tolist()) == POEM[: (cut - 1) // 10 * 10]
    tested = POEM[cut:]
    assert bytes(dataset.test.inputs.flatten().tolist()) == tested[: (len(tested) - 1) // 10 * 10]
    assert dataset.classes == 256
    assert dataset.transform == TokenTransform(is_bytes=True)


def test_defaults_are_a_context_of_128_and_a_tenth_for_the_test(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * 12_810)
    dataset = load(path)
    assert dataset.sample_shape == (128,)
    assert (len(dataset.train), len(dataset.test)) == (11_528 // 128, 1280 // 128)


def test_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": "bbb", "a/z.txt": "zz\n", "a/y.txt": "y", ".hidden": "h", ".git/x": "g",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    dataset = load(tmp_path, context=1, text_test_fraction=0.25)
    tokens = [*dataset.train.inputs.flatten(), *dataset.train.targets[-1], *dataset.test.inputs]
    assert bytes(map(int, tokens)) == b"y\nzz\nbb"


def test_large_file_is_memory_mapped_with_the_same_samples(poem: Path) -> None:
    resident, mapped = load(poem, context=10), load(poem, context=10, resident_limit_bytes=0)
    assert torch.equal(resident.train.inputs, mapped.train.inputs)
    assert torch.equal(resident.test.targets, mapped.test.targets)
    mapped.train.inputs[0, 0] = 7
    assert poem.read_bytes() == POEM


def test_character_across_parts_of_a_file_is_valid(
    poem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_READ_BYTES", 1)
    assert load(poem, context=10).classes == 256


@pytest.mark.parametrize("part_bytes", [1, 3, 1000])
@pytest.mark.parametrize(
    ("content", "position"),
    [(b"good text, \xff bad", 11), ("Größe ".encode() + "ö".encode("latin1") + b"l", 8)],
)
def test_text_that_is_not_utf8_is_rejected_with_its_position(
    content: bytes,
    position: int,
    part_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text, "_READ_BYTES", part_bytes)
    (tmp_path / "odd.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"odd.txt is not UTF-8 \(byte {position}\): convert it"):
        load(tmp_path)


def test_text_cut_within_a_character_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "cut.txt").write_bytes("€".encode()[:2])
    with pytest.raises(DataError, match=r"cut.txt is not UTF-8 \(byte 0\)"):
        load(tmp_path)


def test_missing_path_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none.txt: No such file or directory$"):
        load(tmp_path / "none.txt")


def test_empty_file_and_folder_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no text"):
        load(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty.txt has no text"):
        load(tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("length", "settings", "problem"),
    [
        (
            100,
            {"context": 90},
            "--context: must be at most 9 for the test set of {} (10 of 100 bytes), got 90",
        ),
        (100, {}, "--context: must be at most 9 for the test set of {} (10 of 100 bytes), got 128"),
        (
            100,
            {"context": 30, "text_test_fraction": 0.8},
            "--context: must be at most 19 for the train set of {} (20 of 100 bytes), got 30",
        ),
        (
            4,
            {"context": 1},
            "--data: the test set of {} has 0 of 4 bytes: use more text",
        ),
    ],
)
def test_context_longer_than_the_text_is_rejected(
    length: int, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * length)
    with pytest.raises(ConfigError) as caught:
        load(path, **settings)
    assert caught.value.problems == (problem.format(path),)


def test_many_files_above_the_limit_are_rejected(poem: Path) -> None:
    poem.with_name("second.txt").write_text("more")
    with pytest.raises(DataError, match="join its files into one"):
        load(poem.parent, resident_limit_bytes=100)


def test_path_is_part_of_the_name(poem: Path) -> None:
    config = RunConfig(data=f"text:{poem}", context=10, batch_size=4, train_samples=20)
    dataset = load_dataset(config)
    assert dataset.name == f"text:{poem}"
    assert len(dataset.train) == 20
    with pytest.raises(UnknownNameError, match="use text:PATH"):
        load_dataset(RunConfig(data="text"))


def test_images_options_are_rejected(poem: Path) -> None:
    with pytest.raises(ConfigError, match="--augment: requires uint8 images"):
        load_dataset(RunConfig(data=f"text:{poem}", context=10, batch_size=4, augment=("flip",)))
