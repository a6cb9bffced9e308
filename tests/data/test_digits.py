"""Synthetic digits: reproducible, extendable, cached on disk, neither trivial nor unreadable."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data import digits
from paceline.data.dataset import LoadRequest, Split
from paceline.data.digit_images import FONTS, WIDTH
from paceline.data.digits import DIGITS, PLAIN_DIGITS, SyntheticDigits
from paceline.data.storage import Chunk, mapped_split
from paceline.errors import DataError

EACH_SET = pytest.mark.parametrize("drawing", [DIGITS, PLAIN_DIGITS], ids=lambda each: each.name)


def generate(split: str, samples: int, seed: int = 0, drawing: SyntheticDigits = DIGITS) -> Split:
    images, labels = zip(*drawing.draw(split, samples, seed), strict=True)
    return Split(torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels)))


def assert_same(one: Split, other: Split) -> None:
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize(
    ("samples", "free_bytes", "message"),
    [
        (10**12, 78_300_000_000, "has 78.3 GB free but needs 1,025.0 TB: use fewer"),
        (10**6, 300_000_000, "has 300.0 MB free but needs 1.0 GB: use fewer"),
    ],
)
def test_dataset_larger_than_the_disk_is_rejected_in_readable_units(
    samples: int, free_bytes: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DataError, match=message):
        mapped_split(tmp_path / "kept", [], lambda: iter(()), samples, (1, 32, 32))


@pytest.fixture
def cache_small_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache datasets of 100 samples on disk as if they were large."""
    monkeypatch.setattr(digits, "_MAX_UNCACHED_SAMPLES", 0)


def request_in(folder: Path, **changes: Any) -> LoadRequest:
    return LoadRequest(folder=str(folder), train_samples=100, test_samples=50, **changes)


@pytest.mark.parametrize(("drawing", "shape"), [(DIGITS, (3, 32, 32)), (PLAIN_DIGITS, (1, 28, 28))])
def test_images_are_uint8_and_labels_are_digits(
    drawing: SyntheticDigits, shape: tuple[int, int, int]
) -> None:
    dataset = drawing(LoadRequest(train_samples=30, test_samples=20))
    assert dataset.train.inputs.shape == (30, *shape)
    assert dataset.test.inputs.shape == (20, *shape)
    assert dataset.train.inputs.dtype == torch.uint8
    assert dataset.train.targets.dtype == torch.uint8
    assert dataset.classes == 10


@pytest.mark.parametrize("samples", [1, 249, 250, 251, 600])
def test_smaller_dataset_is_a_prefix_of_a_larger_one(samples: int) -> None:
    assert_same(generate("train", samples), generate("train", 700).head(samples))


def test_images_do_not_depend_on_thread_count() -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(generate("train", 500))
    finally:
        torch.set_num_threads(threads)
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_splits_seeds_and_chunks_have_distinct_images() -> None:
    images = torch.cat(
        [
            generate("train", 500).inputs,
            generate("test", 250).inputs,
            generate("train", 250, seed=1).inputs,
        ]
    )
    assert len(torch.unique(images.flatten(1), dim=0)) == 1000


def test_labels_are_uniformly_distributed() -> None:
    counts = torch.bincount(generate("train", 2000).targets, minlength=10)
    # Five standard deviations of the uniform distribution.
    assert (counts - 200).abs().max() < 5 * (2000 * 0.1 * 0.9) ** 0.5


@EACH_SET
def test_declared_mean_and_std_match_the_images(drawing: SyntheticDigits) -> None:
    images = generate("train", 2000, drawing=drawing).inputs.double() / 255
    torch.testing.assert_close(
        images.mean((0, 2, 3)), torch.tensor(drawing.transform.mean).double(), atol=0.02, rtol=0
    )
    torch.testing.assert_close(
        images.std((0, 2, 3)), torch.tensor(drawing.transform.std).double(), atol=0.02, rtol=0
    )


def test_every_glyph_fills_its_box_and_stays_inside() -> None:
    for font in FONTS:
        for digit in range(10):
            points = [point for stroke in font.strokes(digit) for point in stroke]
            assert min(y for _, y in points) == pytest.approx(0, abs=0.03)
            assert max(y for _, y in points) == pytest.approx(1, abs=0.03)
            assert all(-0.01 <= x <= WIDTH + 0.01 for x, _ in points)


def accuracy_after_training(network: nn.Module, train: Split, test: Split) -> float:
    def prepare(images: Tensor) -> Tensor:
        return images.float() / 50 - 1.8

    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for epoch in range(4):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(64):
            loss = F.cross_entropy(network(prepare(train.inputs[rows])), train.targets[rows].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return float((network(prepare(test.inputs)).argmax(1) == test.targets).float().mean())


def test_cnn_learns_digits_and_a_linear_model_does_not() -> None:
    train, test = generate("train", 3000), generate("test", 1000)
    torch.manual_seed(0)
    convolutional = nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2), nn.ReLU(), nn.Conv2d(12, 24, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 25, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    assert accuracy_after_training(convolutional, train, test) > 0.4
    assert accuracy_after_training(linear, train, test) < 0.3


def test_linear_model_learns_most_plain_digits() -> None:
    train, test = (
        generate(*part, drawing=PLAIN_DIGITS) for part in (("train", 3000), ("test", 1000))
    )
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    assert 0.6 < accuracy_after_training(linear, train, test) < 0.97


@pytest.mark.usefixtures("cache_small_datasets")
class TestCache:
    @pytest.fixture
    def never_generated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow generating only the first chunk, which validates the cache."""

        draw = SyntheticDigits.draw

        def first_chunk(
            drawing: SyntheticDigits, split: str, samples: int, seed: int
        ) -> Iterator[Chunk]:
            yield next(iter(draw(drawing, split, samples, seed)))
            raise AssertionError("generated although it was cached")

        monkeypatch.setattr(SyntheticDigits, "draw", first_chunk)

    def test_cached_dataset_equals_generated_dataset(self, tmp_path: Path) -> None:
        first = DIGITS(request_in(tmp_path))
        again = DIGITS(request_in(tmp_path))
        assert_same(first.train, generate("train", 100))
        assert_same(again.train, generate("train", 100))
        assert_same(again.test, generate("test", 50))

    def test_cached_dataset_is_not_generated_again(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        DIGITS(request_in(tmp_path))
        request.getfixturevalue("never_generated")
        DIGITS(request_in(tmp_path))

    def test_each_seed_and_size_has_its_own_file(self, tmp_path: Path) -> None:
        DIGITS(request_in(tmp_path))
        assert_same(DIGITS(request_in(tmp_path, seed=5)).train, generate("train", 100, seed=5))

    @pytest.mark.parametrize("harm", ["emptied", "cut short", "overwritten", "labels overwritten"])
    def test_corrupt_cache_is_regenerated(self, tmp_path: Path, harm: str) -> None:
        DIGITS(request_in(tmp_path))
        (file,) = (tmp_path / "digits").glob("*train*.decoded")
        content = bytearray(file.read_bytes())
        if harm == "emptied":
            content.clear()
        elif harm == "cut short":
            del content[-1000:]
        elif harm == "overwritten":
            content[5000:6000] = bytes(1000)
        else:
            content[-5:] = b"\xff" * 5
        file.write_bytes(content)
        assert_same(DIGITS(request_in(tmp_path)).train, generate("train", 100))
        assert file.read_bytes() != content

    def test_unwritable_folder_is_not_an_error(self, tmp_path: Path) -> None:
        not_a_folder = tmp_path / "file"
        not_a_folder.touch()
        assert_same(DIGITS(request_in(not_a_folder)).train, generate("train", 100))

    def test_dataset_above_the_limit_is_mapped(self, tmp_path: Path) -> None:
        mapped = DIGITS(request_in(tmp_path, resident_limit_bytes=1000))
        assert_same(mapped.train, generate("train", 100))

    def test_dataset_above_the_limit_requires_a_writable_cache(self, tmp_path: Path) -> None:
        not_a_folder = tmp_path / "file"
        not_a_folder.touch()
        with pytest.raises(DataError, match="use another --data-dir"):
            DIGITS(request_in(not_a_folder, resident_limit_bytes=1000))


def test_small_datasets_are_not_cached(tmp_path: Path) -> None:
    DIGITS(request_in(tmp_path))
    assert not list(tmp_path.iterdir())
