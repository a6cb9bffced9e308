"""Safe pickle reader: builds plain data, executes nothing, rejects everything else."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.data.restricted_pickle import ByteArray, PickleRefusedError, read_plain_pickle
from tests.support.dataset_files import cut_positions, python2_batch, python3_batch, random_bytes

DATA = random_bytes(3, 3072)
LABELS = [7, 0, 9]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_python_3_batch_matches_pickled_values(protocol: int) -> None:
    value = read_plain_pickle(python3_batch(protocol)(DATA, LABELS))
    assert isinstance(value, dict)
    assert isinstance(value["data"], ByteArray)
    np.testing.assert_array_equal(value["data"].values, DATA)
    assert value["labels"] == LABELS


def test_python_2_batch_matches_pickled_values() -> None:
    pickled = python2_batch(DATA, LABELS)
    # The way that CIFAR-10's page tells to read it; it shows that the bytes above are such a batch.
    expected = pickle.loads(pickled, encoding="bytes")
    value = read_plain_pickle(pickled)
    assert isinstance(value, dict)
    np.testing.assert_array_equal(value.pop(b"data").values, expected.pop(b"data"))
    assert value == expected


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_code_payload_is_rejected_and_not_executed(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "ran"
    pickled = pickle.dumps({"data": Payload(f"touch {trace}")}, protocol=protocol)
    with pytest.raises(PickleRefusedError, match=r"refers to posix\.system"):
        read_plain_pickle(pickled)
    assert not trace.exists()


def test_object_array_is_rejected() -> None:
    with pytest.raises(PickleRefusedError, match="other than the uint8 array constructor"):
        read_plain_pickle(pickle.dumps(np.array([{}], dtype=object), protocol=2))


def test_float_array_is_rejected() -> None:
    with pytest.raises(PickleRefusedError, match="other than the uint8 array constructor"):
        read_plain_pickle(pickle.dumps(np.arange(3.0), protocol=2))


def test_huge_shape_without_contents_is_rejected() -> None:
    pickled = python2_batch(DATA, LABELS).replace(
        b"M" + struct.pack("<H", 3) + b"M" + struct.pack("<H", 3072),
        b"J" + struct.pack("<i", 2**31 - 1) + b"J" + struct.pack("<i", 2**31 - 1),
    )
    with pytest.raises(PickleRefusedError, match="shape does not match its contents"):
        read_plain_pickle(pickled)


@pytest.mark.parametrize("batch", [python2_batch, python3_batch(2), python3_batch(4)])
def test_truncated_pickle_is_rejected(batch: object) -> None:
    assert callable(batch)
    pickled = batch(DATA, LABELS)
    for position in cut_positions(len(pickled)):
        with pytest.raises(PickleRefusedError):
            read_plain_pickle(pickled[:position])


def test_corrupt_pickles_never_crash_the_reader() -> None:
    pickled = python2_batch(DATA[:1, :64], LABELS[:1])
    rejected = 0
    for position in range(len(pickled)):
        for flip in (0x01, 0x10, 0xFF):
            corrupt = bytearray(pickled)
            corrupt[position] ^= flip
            try:
                read_plain_pickle(bytes(corrupt))
            except PickleRefusedError:
                rejected += 1
    # Changed pixels are still valid data; changed opcodes are not.
    assert 0 < rejected < 3 * len(pickled)


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b".",
        b"\x80\x02.",
        b"\x80\x02N",
        b"\x80\x02(.",
        b"\x80\x02h\x07.",
        b"\x80\x02]K\x01s.",
        b"\x80\x02}((tK\x01u.",
        b"\x80\x02R.",
        b"\x80\x02b.",
        b"\x80\x02c" + b"a" * 1000,
        b"\x80\x02X\xff\xff\xff\x7fa.",
        b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x04\x8e" + b"\xff" * 8 + b".",
        b"\x80\x05N.",
        b"\x80\x02N.N.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02i__main__\nX\n.",
    ],
)
def test_malformed_pickles_are_rejected(pickled: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        read_plain_pickle(pickled)


def test_repeatedly_encoded_text_is_rejected() -> None:
    text = b"X" + struct.pack("<I", 4000) + b"a" * 4000 + b"q\x00"
    encode = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    with pytest.raises(PickleRefusedError, match="encodes more text than it contains"):
        read_plain_pickle(b"\x80\x02](" + text + encode * 50 + b"e.")


def test_huge_memo_index_allocates_nothing() -> None:
    assert read_plain_pickle(b"\x80\x02K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.") == (5, 5)
