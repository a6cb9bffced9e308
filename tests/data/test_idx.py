"""IDX reader: exact contents, and CorruptFileError for any invalid file."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from paceline.data.manifest import CorruptFileError
from paceline.data.mnist import read_idx
from tests.support.dataset_files import (
    BOMB_BYTES,
    Bytes,
    cut_positions,
    idx_bytes,
    peak_below,
    random_bytes,
)

IMAGES = random_bytes(5, 28, 28)
PACKED = gzip.compress(idx_bytes(IMAGES), mtime=0)


def read_all(path: Path, *shape: int) -> Bytes:
    return np.concatenate(list(read_idx(path, shape)))


def test_images_match_written_values(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED)
    np.testing.assert_array_equal(read_all(path, 5, 28, 28), IMAGES)


def test_entries_are_complete_across_chunks(tmp_path: Path) -> None:
    labels = random_bytes(10_000)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx_bytes(labels)))
    np.testing.assert_array_equal(read_all(path, 10_000), labels)


@pytest.mark.parametrize("position", cut_positions(len(PACKED)))
def test_truncated_file_is_rejected(tmp_path: Path, position: int) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED[:position])
    with pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


@pytest.mark.parametrize("position", [0, 2, 12, 30, 500, len(PACKED) - 6])
def test_flipped_byte_is_rejected(tmp_path: Path, position: int) -> None:
    corrupt = bytearray(PACKED)
    corrupt[position] ^= 0xFF
    path = tmp_path / "images.gz"
    path.write_bytes(corrupt)
    with pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


def test_labels_in_place_of_images_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(random_bytes(5))))
    with pytest.raises(CorruptFileError, match="contains labels, expected images"):
        read_all(path, 5, 28, 28)


def test_wrong_sample_count_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED)
    with pytest.raises(CorruptFileError, match=r"shape \(5, 28, 28\), expected \(6, 28, 28\)"):
        read_all(path, 6, 28, 28)


def test_trailing_bytes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx_bytes(IMAGES) + b"x"))
    with pytest.raises(CorruptFileError, match="more than 5 entries"):
        read_all(path, 5, 28, 28)


def test_gzip_bomb_is_not_decompressed_beyond_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    # Compressed, it is small enough to pass the file size limit.
    path.write_bytes(gzip.compress(idx_bytes(IMAGES) + bytes(BOMB_BYTES)))
    with peak_below(BOMB_BYTES // 8), pytest.raises(CorruptFileError):
        read_all(path, 5, 28, 28)


def test_oversized_file_is_rejected_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(PACKED + bytes(1 << 17))
    with pytest.raises(CorruptFileError, match="too large"):
        read_all(path, 5, 28, 28)
