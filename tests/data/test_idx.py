"""The IDX reader: exact contents, and nothing but CorruptFileError for anything else."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from synthetic_sets import BOMB_BYTES, Bytes, cut_positions, idx_bytes, peak_below, random_bytes

from paceline.data.manifest import CorruptFileError
from paceline.data.mnist import read_idx

IMAGES = random_bytes(5, 28, 28)
PACKED = gzip.compress(idx_bytes(IMAGES), mtime=0)


def read_all(path: Path, *shape: int) -> Bytes:
    return np.concatenate(list(read_idx(path, shape)))


def test_images_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED)
    np.testing.assert_array_equal(read_all(path, 5, 28, 28), IMAGES)


def test_many_entries_come_whole_over_several_chunks(tmp_path: Path) -> None:
    labels = random_bytes(10_000)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx_bytes(labels)))
    np.testing.assert_array_equal(read_all(path, 10_000), labels)


@pytest.mark.parametrize("position", cut_positions(len(PACKED)))
def test_a_file_cut_anywhere_is_damaged(tmp_path: Path, position: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED[:position])
    with pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


@pytest.mark.parametrize("position", [0, 2, 12, 30, 500, len(PACKED) - 6])
def test_a_flipped_byte_is_damage(tmp_path: Path, position: int) -> None:
    scrambled = bytearray(PACKED)
    scrambled[position] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(scrambled)
    with pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


def test_labels_in_the_place_of_images_are_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(random_bytes(5))))
    with pytest.raises(CorruptFileError, match="holds labels where images should be"):
        read_all(path, 5, 28, 28)


def test_another_number_of_samples_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED)
    with pytest.raises(
        CorruptFileError, match=r"shape \(5, 28, 28\) where \(6, 28, 28\) should be"
    ):
        read_all(path, 6, 28, 28)


def test_bytes_after_the_last_entry_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES) + b"x"))
    with pytest.raises(CorruptFileError, match="more than its 5 entries"):
        read_all(path, 5, 28, 28)


def test_a_bomb_is_not_inflated_beyond_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    # Small enough, packed, to pass the limit on a file's own size.
    path.write_bytes(gzip.compress(idx_bytes(IMAGES) + bytes(BOMB_BYTES)))
    with peak_below(BOMB_BYTES // 8), pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


def test_a_far_too_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED + bytes(1 << 17))
    with pytest.raises(CorruptFileError, match="too large"):
        read_all(path, 5, 28, 28)
