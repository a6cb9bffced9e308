"""MATLAB 5 reader: reads files written by SciPy; CorruptFileError for any invalid file."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from paceline.data.files import Source
from paceline.data.manifest import CorruptFileError
from paceline.data.matfile import read_variables
from paceline.data.svhn import read_files
from tests.support.dataset_files import (
    BOMB_BYTES,
    MAT_HEADER,
    Bytes,
    cut_positions,
    mat_file,
    mat_variable,
    peak_below,
    random_bytes,
)

# What scipy.io.savemat (SciPy 1.17.1, do_compression=True) writes after the header for
# X[row, column, channel, sample] = row // 4 + 8 * (column // 8) + 40 * channel + 120 * sample and
# the doubles y = [[10], [3]].
FROM_SCIPY = MAT_HEADER + base64.b64decode(
    "DwAAAIcBAAB4nN3KRVOWURyH4QcQBAOxX9ul3YHduLXF7q6tYncH5tbubsXY2t3dfA2vGfgU/+vMb86ZuU9ukiT5"
    "qSTJcmdbTlIm0/KsafkyLN3SnMLyd5Iq+5tGOhlUIJMsKhK9Z5NDJSpTharkUo3oPY/q1KAmtahNHeoSvaeoR30a"
    "0JBGNKYJ0XszmtOClrSiNW1oS/TejvZ0oCOd6EwXuhK959ON7vSgJ73oTR+i9770oz8DGMggChhM9D6EoQxjOCMY"
    "yShGE70XMoaxjGM8E5jIJKL3yUxhKtOYzgxmMovofTZzmMs85rOAhSwiel/MEopYyjKWs4KVRO+rWM0a1rKO9Wxg"
    "I9H7Jjazha1sYzs72En0votidrOHvexjPweI3g9yiMMc4SjHOM4JoveTnOI0ZzjLOc5zgej9Ipe4zBWuco3r3CB6"
    "v8ktblPCHe5yj/tE7w94yCMe84SnPOM50fsLXvKK17zhLe94T/T+gY984jNf+Mo3vhO9/+Anv/jNH/7yj1Ki9//9"
    "kNXaDwAAAC0AAAB4nONjYGBwAGI2IOaA0iDACuUzATEjGDMyVAJpTiAWYIABFQcIzeEAADA2AbM="
)

IMAGES = random_bytes(4, 3, 32, 32)
DIGITS = [0, 9, 1, 5]


def read_all(path: Path, samples: int) -> tuple[Bytes, Bytes]:
    chunks = list(read_files([Source(path, samples)], samples))
    return (
        np.concatenate([images for images, _ in chunks]),
        np.concatenate([labels for _, labels in chunks]),
    )


def test_file_written_by_scipy_has_correct_axis_order(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(FROM_SCIPY)
    sample, channel, row, column = np.indices((2, 3, 32, 32))
    images, labels = read_all(path, 2)
    expected = row // 4 + 8 * (column // 8) + 40 * channel + 120 * sample
    np.testing.assert_array_equal(images, expected)
    np.testing.assert_array_equal(labels, [0, 3])


@pytest.mark.parametrize("deflated", [True, False])
def test_samples_match_written_values(tmp_path: Path, deflated: bool) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(mat_file(IMAGES, DIGITS, deflated=deflated))
    images, labels = read_all(path, 4)
    np.testing.assert_array_equal(images, IMAGES)
    np.testing.assert_array_equal(labels, DIGITS)


def test_variables_may_appear_in_any_order_among_others(tmp_path: Path) -> None:
    labels = np.array([[10], [9], [1], [5]], np.float64)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(
        MAT_HEADER
        + mat_variable("y", labels, deflated=True)
        + mat_variable("z", labels, deflated=False)
        + mat_variable("X", IMAGES.transpose(2, 3, 1, 0), deflated=True)
    )
    np.testing.assert_array_equal(read_all(path, 4)[0], IMAGES)


@pytest.mark.parametrize("deflated", [True, False])
@pytest.mark.parametrize("position", cut_positions(len(mat_file(IMAGES, DIGITS))))
def test_truncated_file_is_rejected(tmp_path: Path, position: int, deflated: bool) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(mat_file(IMAGES, DIGITS, deflated=deflated)[:position])
    with pytest.raises(CorruptFileError):
        read_all(path, 4)


@pytest.mark.parametrize("position", [125, 126, 128, 133, 137, 145, 200, 5000, 12_000])
def test_flipped_byte_of_a_compressed_file_is_rejected(tmp_path: Path, position: int) -> None:
    corrupt = bytearray(mat_file(IMAGES, DIGITS))
    corrupt[position] ^= 0xFF
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(corrupt)
    with pytest.raises(CorruptFileError):
        read_all(path, 4)


def test_wrong_sample_count_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "test_32x32.mat"
    path.write_bytes(mat_file(IMAGES, DIGITS))
    with pytest.raises(CorruptFileError, match=r"has y of shape \(4, 1\), expected \(3, 1\)"):
        read_all(path, 3)


@pytest.mark.parametrize("label", [0, 11, 1.5])
def test_label_outside_1_to_10_is_rejected(tmp_path: Path, label: float) -> None:
    path = tmp_path / "train_32x32.mat"
    images = mat_variable("X", IMAGES[:1].transpose(2, 3, 1, 0), deflated=True)
    labels = mat_variable("y", np.array([[label]], np.float64), deflated=True)
    path.write_bytes(MAT_HEADER + images + labels)
    with pytest.raises(CorruptFileError, match="label outside 1 to 10"):
        read_all(path, 1)


def test_shape_that_does_not_match_data_size_is_rejected_before_reading(tmp_path: Path) -> None:
    lying = bytearray(mat_variable("X", IMAGES.transpose(2, 3, 1, 0), deflated=False))
    struct.pack_into("<i", lying, 8 + 16 + 8 + 12, 2**31 - 1)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(MAT_HEADER + lying)
    with pytest.raises(CorruptFileError, match="bytes of numbers for shape"):
        next(read_variables(path))


def test_zip_bomb_is_not_decompressed_beyond_the_shape(tmp_path: Path) -> None:
    honest = mat_file(IMAGES, DIGITS, deflated=False)[128:]
    small = zlib.compress(honest[: 8 + 56 + 8 + IMAGES.size] + bytes(BOMB_BYTES))
    labels = mat_variable("y", np.array([[1]] * 4, np.uint8), deflated=True)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(MAT_HEADER + struct.pack("<II", 15, len(small)) + small + labels)
    with peak_below(BOMB_BYTES // 8), pytest.raises(CorruptFileError, match="trailing data"):
        read_all(path, 4)


@pytest.mark.parametrize("header", [b"\x00\x02IM", b"\x01\x00MI"])
def test_other_versions_and_byte_orders_are_rejected(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(MAT_HEADER[:124] + header)
    with pytest.raises(CorruptFileError, match="not a little-endian MATLAB 5 file"):
        list(read_variables(path))
