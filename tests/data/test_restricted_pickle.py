"""The reader of plain pickles: builds data, runs nothing, and refuses the rest."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from synthetic_sets import cut_positions, python2_batch, python3_batch, random_bytes

from paceline.data.restricted_pickle import ByteArray, PickleRefusedError, read_plain_pickle

DATA = random_bytes(3, 3072)
LABELS = [7, 0, 9]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_python_3_batch_is_read_as_pickled(protocol: int) -> None:
    value = read_plain_pickle(python3_batch(protocol)(DATA, LABELS))
    assert isinstance(value, dict)
    assert isinstance(value["data"], ByteArray)
    np.testing.assert_array_equal(value["data"].values, DATA)
    assert value["labels"] == LABELS


def test_a_python_2_batch_is_read_as_pickled() -> None:
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
def test_a_payload_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "ran"
    pickled = pickle.dumps({"data": Payload(f"touch {trace}")}, protocol=protocol)
    with pytest.raises(PickleRefusedError, match=r"asks for posix\.system"):
        read_plain_pickle(pickled)
    assert not trace.exists()


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(PickleRefusedError, match="no array of unsigned bytes"):
        read_plain_pickle(pickle.dumps(np.array([{}], dtype=object), protocol=2))


def test_an_array_of_other_numbers_is_refused() -> None:
    with pytest.raises(PickleRefusedError, match="no array of unsigned bytes"):
        read_plain_pickle(pickle.dumps(np.arange(3.0), protocol=2))


def test_a_huge_shape_is_refused_without_its_contents() -> None:
    pickled = python2_batch(DATA, LABELS).replace(
        b"M" + struct.pack("<H", 3) + b"M" + struct.pack("<H", 3072),
        b"J" + struct.pack("<i", 2**31 - 1) + b"J" + struct.pack("<i", 2**31 - 1),
    )
    with pytest.raises(PickleRefusedError, match="shape and contents differ"):
        read_plain_pickle(pickled)


@pytest.mark.parametrize("batch", [python2_batch, python3_batch(2), python3_batch(4)])
def test_a_pickle_cut_anywhere_is_refused(batch: object) -> None:
    assert callable(batch)
    pickled = batch(DATA, LABELS)
    for position in cut_positions(len(pickled)):
        with pytest.raises(PickleRefusedError):
            read_plain_pickle(pickled[:position])


def test_scrambled_pickles_are_refused_or_read_but_never_break_the_reader() -> None:
    pickled = python2_batch(DATA[:1, :64], LABELS[:1])
    for position in range(len(pickled)):
        for flip in (0x01, 0x10, 0xFF):
            scrambled = bytearray(pickled)
            scrambled[position] ^= flip
            try:
                read_plain_pickle(bytes(scrambled))
            except PickleRefusedError:
                continue


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
def test_malformed_programs_are_refused(pickled: bytes) -> None:
    with pytest.raises(PickleRefusedError):
        read_plain_pickle(pickled)


def test_a_text_encoded_over_and_over_is_refused() -> None:
    text = b"X" + struct.pack("<I", 4000) + b"a" * 4000 + b"q\x00"
    encode = b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R"
    with pytest.raises(PickleRefusedError, match="repeats its contents"):
        read_plain_pickle(b"\x80\x02](" + text + encode * 50 + b"e.")


def test_a_huge_memo_index_costs_nothing() -> None:
    assert read_plain_pickle(b"\x80\x02K\x05r\xff\xff\xff\xffj\xff\xff\xff\xff\x86.") == (5, 5)
