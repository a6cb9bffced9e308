"""Strict streaming reader for MATLAB 5 files of plain numeric arrays, such as those of SVHN.

A file is a 128-byte header followed by elements: an 8-byte tag (type, size in bytes) and data. A
variable is a matrix element that itself consists of elements (flags, shape, name, numbers),
optionally zlib-compressed. Variables are decompressed as they are consumed and only up to their
declared shape, so memory use stays bounded even for a malicious file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.manifest import CorruptFileError

_MATRIX, _COMPRESSED = 14, 15
_INT8, _INT32, _UINT32 = 1, 5, 6
_NUMBERS: dict[int, type[np.generic]] = {
    _INT8: np.int8,
    2: np.uint8,
    3: np.int16,
    4: np.uint16,
    _INT32: np.int32,
    _UINT32: np.uint32,
    7: np.float32,
    9: np.float64,
}
# double, single and the integers up to 32 bits.
_NUMERIC_CLASSES = frozenset(range(6, 14))
_COMPLEX_FLAG = 0x0800

_HEADER_BYTES = 128
_MAX_DIMENSIONS = 8
_MAX_NAME_BYTES = 64
_MAX_VARIABLES = 16
_INFLATE_BYTES = 1 << 18


class _Stream(Protocol):
    """The content of one element."""

    def read(self, count: int) -> bytes:
        """Return exactly `count` bytes or raise CorruptFileError."""

    def finish(self) -> None:
        """Raise CorruptFileError if unread data other than padding is left."""


@dataclass(frozen=True, slots=True)
class MatVariable:
    """One variable of a file; its numbers can be read once, before the iteration moves on."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: type[np.generic]
    _data_bytes: int
    _padding_bytes: int
    _stream: _Stream

    def numbers(self, at_once: int, wanted: int | None = None) -> Iterator[NDArray[np.generic]]:
        """Yield the numbers in file order (column-major), at most `at_once` at a time.

        `wanted` limits the total. A variable that is read completely must have no trailing data.
        """
        item_bytes = np.dtype(self.dtype).itemsize
        total = self._data_bytes // item_bytes
        remaining = total if wanted is None else min(wanted, total)
        reads_all = remaining == total
        while remaining:
            count = min(at_once, remaining)
            remaining -= count
            yield np.frombuffer(self._stream.read(count * item_bytes), self.dtype)
        if reads_all:
            self._stream.read(self._padding_bytes)
            self._stream.finish()


def read_variables(path: Path) -> Generator[MatVariable]:
    """Yield the variables of a file in order; skipping the numbers of one is cheap."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        _check_header(path, file.read(_HEADER_BYTES))
        for _ in range(_MAX_VARIABLES):
            tag = file.read(8)
            if not tag:
                return
            if len(tag) < 8:
                raise CorruptFileError(path, "is truncated")
            kind, size_bytes = struct.unpack("<II", tag)
            end = file.tell() + size_bytes
            if end > file_bytes:
                raise CorruptFileError(path, "is truncated")
            yield _open_variable(path, _open_element(path, file, kind, size_bytes))
            file.seek(end)
        if file.read(1):
            raise CorruptFileError(path, f"has more than {_MAX_VARIABLES} variables")


def _check_header(path: Path, header: bytes) -> None:
    if len(header) < _HEADER_BYTES:
        raise CorruptFileError(path, "is truncated")
    version, order = struct.unpack("<H2s", header[124:])
    if order != b"IM" or version != 0x0100:
        raise CorruptFileError(path, "is not a little-endian MATLAB 5 file")


def _open_element(path: Path, file: BinaryIO, kind: int, size_bytes: int) -> _Stream:
    if kind == _MATRIX:
        return _Plain(path, file, size_bytes)
    if kind != _COMPRESSED:
        raise CorruptFileError(path, f"has an element of type {kind}, expected a variable")
    inflated = _Inflated(path, file, size_bytes)
    kind, _ = struct.unpack("<II", inflated.read(8))
    if kind != _MATRIX:
        raise CorruptFileError(path, f"has an element of type {kind}, expected a variable")
    return inflated


def _open_variable(path: Path, stream: _Stream) -> MatVariable:
    flags_kind, flags = _small_element(path, stream, 8)
    if flags_kind != _UINT32 or len(flags) != 8:
        raise CorruptFileError(path, "has a variable without array flags")
    if flags[0] not in _NUMERIC_CLASSES or struct.unpack("<I", flags[:4])[0] & _COMPLEX_FLAG:
        raise CorruptFileError(path, "has a variable that is not an array of real numbers")
    shape_kind, shape_data = _small_element(path, stream, 4 * _MAX_DIMENSIONS)
    if shape_kind != _INT32 or len(shape_data) % 4 or len(shape_data) < 8:
        raise CorruptFileError(path, "has a variable without a shape")
    shape = struct.unpack(f"<{len(shape_data) // 4}i", shape_data)
    if min(shape) < 0:
        raise CorruptFileError(path, f"has a variable of invalid shape {shape}")
    name_kind, name = _small_element(path, stream, _MAX_NAME_BYTES)
    if name_kind != _INT8:
        raise CorruptFileError(path, "has a variable without a name")
    kind, data_bytes, padding_bytes, small = _tag(stream)
    if kind not in _NUMBERS:
        raise CorruptFileError(path, f"has numbers of unknown type {kind}")
    dtype = _NUMBERS[kind]
    entries = 1
    for length in shape:
        entries *= length
    if data_bytes != entries * np.dtype(dtype).itemsize:
        raise CorruptFileError(path, f"has {data_bytes} bytes of numbers for shape {shape}")
    if small is not None:
        stream = _Small(path, small, stream)
    return MatVariable(
        path, name.decode("latin-1"), shape, dtype, data_bytes, padding_bytes, stream
    )


def _tag(stream: _Stream) -> tuple[int, int, int, bytes | None]:
    """Return type, data size, padding size, and the data itself if the tag contains it."""
    raw = stream.read(8)
    kind, size_bytes = struct.unpack("<II", raw)
    if kind >> 16:
        size_bytes = kind >> 16
        return kind & 0xFFFF, size_bytes, 0, raw[4 : 4 + min(size_bytes, 4)]
    return kind, size_bytes, -size_bytes % 8, None


def _small_element(path: Path, stream: _Stream, limit_bytes: int) -> tuple[int, bytes]:
    kind, size_bytes, padding_bytes, small = _tag(stream)
    if size_bytes > (4 if small is not None else limit_bytes):
        raise CorruptFileError(path, "has an oversized element in a variable header")
    if small is not None:
        return kind, small
    data = stream.read(size_bytes)
    stream.read(padding_bytes)
    return kind, data


class _Plain:
    """An uncompressed element."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path, self._file, self._left = path, file, size_bytes

    def read(self, count: int) -> bytes:
        if count > self._left:
            raise CorruptFileError(self._path, "has a variable longer than its element")
        data = self._file.read(count)
        if len(data) != count:
            raise CorruptFileError(self._path, "is truncated")
        self._left -= count
        return data

    def finish(self) -> None:
        if self._left:
            raise CorruptFileError(self._path, "has trailing data in a variable")


class _Small:
    """Numbers that are stored inside their tag."""

    def __init__(self, path: Path, data: bytes, outer: _Stream) -> None:
        self._path, self._data, self._outer = path, data, outer

    def read(self, count: int) -> bytes:
        data, self._data = self._data[:count], self._data[count:]
        if len(data) != count:
            raise CorruptFileError(self._path, "is truncated")
        return data

    def finish(self) -> None:
        self._outer.finish()


class _Inflated:
    """A compressed element."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path, self._file, self._left = path, file, size_bytes
        self._inflater = zlib.decompressobj()

    def read(self, count: int) -> bytes:
        parts: list[bytes] = []
        missing = count
        while missing:
            part = self._inflate(missing)
            if not part and self._is_exhausted():
                raise CorruptFileError(self._path, "is truncated")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def finish(self) -> None:
        # zlib compares the checksum only when it reaches the end of the stream.
        while not self._inflater.eof:
            if self._inflate(1):
                raise CorruptFileError(self._path, "has trailing data in a variable")
            if self._is_exhausted() and not self._inflater.eof:
                raise CorruptFileError(self._path, "is truncated")

    def _is_exhausted(self) -> bool:
        return self._inflater.eof or not (self._left or self._inflater.unconsumed_tail)

    def _inflate(self, limit: int) -> bytes:
        source = self._inflater.unconsumed_tail
        if not source and self._left:
            source = self._file.read(min(self._left, _INFLATE_BYTES))
            if not source:
                raise CorruptFileError(self._path, "is truncated")
            self._left -= len(source)
        try:
            return self._inflater.decompress(source, limit)
        except zlib.error as error:
            raise CorruptFileError(self._path, f"has invalid compressed data ({error})") from None
