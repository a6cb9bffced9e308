"""Safe pickle reader for CIFAR-10: reads plain data and never executes code.

A pickle is a program for a small stack machine, and Python's own reader lets it call any function.
This reader implements only the opcodes that build numbers, strings, bytes, lists, tuples and
dictionaries, and recognizes the sequences that numpy writes for an array of bytes. It rejects
everything else. Its memory use is bounded by the length of the pickle.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PickleRefusedError(ValueError):
    """The pickle is corrupt or contains more than plain data."""


@dataclass(slots=True, eq=False)
class ByteArray:
    """A numpy array of uint8; empty until the pickle sets its contents."""

    values: NDArray[np.uint8]


class _Global(Enum):
    """Globals that appear in pickled numpy arrays; they are recognized but never called."""

    RECONSTRUCT = "reconstruct"
    ARRAY = "array"
    DTYPE = "dtype"
    ENCODE = "encode"


_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Global.RECONSTRUCT,
    ("numpy", "ndarray"): _Global.ARRAY,
    ("numpy", "dtype"): _Global.DTYPE,
    ("_codecs", "encode"): _Global.ENCODE,
}

_MARK = object()
_STOP = ord(".")
_NUMBERS = {form: struct.Struct("<" + form) for form in "BHiIQ"}
_UNSIGNED_BYTE = object()


def read_plain_pickle(data: bytes) -> object:
    """Return the value of a pickle of protocol 2 to 4; Python 2 strings are returned as bytes."""
    machine = _Machine(data)
    try:
        return machine.run()
    except PickleRefusedError:
        raise
    except (LookupError, ValueError, OverflowError, struct.error):
        raise PickleRefusedError("is malformed") from None


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._encoded_bytes = 0

    def run(self) -> object:
        # A file name and a label of each image are some opcodes each, so this loop takes most of
        # the time to load a dataset.
        data, size_bytes, handlers = self._data, len(self._data), _HANDLERS
        while True:
            if self._position >= size_bytes:
                raise PickleRefusedError("is truncated")
            code = data[self._position]
            self._position += 1
            if code == _STOP:
                if self._position != size_bytes:
                    raise PickleRefusedError("has data after its end")
                return self._pop()
            handler = handlers[code]
            if handler is None:
                raise PickleRefusedError(
                    f"contains opcode {bytes([code])!r}, which plain data does not need"
                )
            handler(self)

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise PickleRefusedError("is truncated")
        part = self._data[self._position : end]
        self._position = end
        return part

    def _number(self, form: str) -> int:
        number, position = _NUMBERS[form], self._position
        self._position = position + number.size
        if self._position > len(self._data):
            raise PickleRefusedError("is truncated")
        value: int = number.unpack_from(self._data, position)[0]
        return value

    def _counted(self, form: str) -> bytes:
        count = self._number(form)
        if count < 0:
            raise PickleRefusedError("has a string of negative length")
        return self._take(count)

    def _line(self) -> str:
        end = self._data.index(b"\n", self._position, self._position + 200)
        line = self._data[self._position : end]
        self._position = end + 1
        return line.decode("ascii")

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefusedError("is malformed")
        return value

    def _top(self, kind: type) -> Any:
        value = self._stack[-1]
        if not isinstance(value, kind):
            raise PickleRefusedError(f"uses a value as a {kind.__name__} that is not one")
        return value

    def _pop_to_mark(self) -> list[Any]:
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is _MARK:
                items = self._stack[index + 1 :]
                del self._stack[index:]
                return items
        raise PickleRefusedError("is malformed")

    def _protocol(self) -> None:
        version = self._number("B")
        if not 2 <= version <= 4:
            raise PickleRefusedError(f"has pickle protocol {version}; only 2 to 4 are supported")

    def _frame(self) -> None:
        """Skip the frame length, which only matters to readers that read in chunks."""
        self._take(8)

    def _append(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise PickleRefusedError("is malformed")
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing nested tuples could exhaust the interpreter stack.
            if not isinstance(key, str | bytes | int):
                raise PickleRefusedError("has a key that is neither a string nor an integer")
            target[key] = value

    def _tuple(self, count: int) -> None:
        items = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(items)))

    def _global(self, module: object, name: object) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleRefusedError("is malformed")
        known = _GLOBALS.get((module, name))
        if known is None:
            raise PickleRefusedError(f"refers to {module}.{name}, not allowed in plain data")
        self._push(known)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._global(module, name)

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Global.RECONSTRUCT, (_Global.ARRAY, (0,), b"b" | "b"):
                self._push(ByteArray(np.empty(0, np.uint8)))
            case _Global.DTYPE, ("u1" | b"u1", *_):
                self._push(_UNSIGNED_BYTE)
            case _Global.ENCODE, (str() as text, "latin1" | b"latin1"):
                self._push(self._encode(text))
            case _:
                raise PickleRefusedError("calls something other than the uint8 array constructor")

    def _encode(self, text: str) -> bytes:
        # Encoding one string repeatedly would use more memory than the length of the pickle.
        self._encoded_bytes += len(text)
        if self._encoded_bytes > len(self._data):
            raise PickleRefusedError("encodes more text than it contains")
        return text.encode("latin-1")

    def _build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        if target is _UNSIGNED_BYTE:
            return
        if not isinstance(target, ByteArray):
            raise PickleRefusedError("sets the state of an object that is not an array")
        match state:
            case (int(), tuple() as shape, kind, False | 0, bytes() as contents) if (
                kind is _UNSIGNED_BYTE and all(type(length) is int for length in shape)
            ):
                # Compare before allocating: the shape alone must not cause an allocation.
                if min(shape, default=0) < 0 or math.prod(shape[:8]) != len(contents):
                    raise PickleRefusedError("has an array whose shape does not match its contents")
                target.values = np.frombuffer(contents, np.uint8).reshape(shape)
            case _:
                raise PickleRefusedError("has an array that is not row-major uint8")

    def _memoize(self, index: int) -> None:
        self._memo[index] = self._stack[-1]


_Opcode = Callable[[_Machine], None]

_OPCODES: dict[bytes, _Opcode] = {
    b"\x80": lambda m: m._protocol(),
    b"\x95": lambda m: m._frame(),
    b"(": lambda m: m._push(_MARK),
    b"N": lambda m: m._push(None),
    b"\x88": lambda m: m._push(True),
    b"\x89": lambda m: m._push(False),
    b"J": lambda m: m._push(m._number("i")),
    b"K": lambda m: m._push(m._number("B")),
    b"M": lambda m: m._push(m._number("H")),
    b"\x8a": lambda m: m._push(int.from_bytes(m._counted("B"), "little", signed=True)),
    b"U": lambda m: m._push(m._counted("B")),
    b"T": lambda m: m._push(m._counted("i")),
    b"C": lambda m: m._push(m._counted("B")),
    b"B": lambda m: m._push(m._counted("I")),
    b"\x8e": lambda m: m._push(m._counted("Q")),
    b"X": lambda m: m._push(m._counted("I").decode("utf-8")),
    b"\x8c": lambda m: m._push(m._counted("B").decode("utf-8")),
    b"]": lambda m: m._push([]),
    b"}": lambda m: m._push({}),
    b")": lambda m: m._push(()),
    b"a": lambda m: m._append([m._pop()]),
    b"e": lambda m: m._append(m._pop_to_mark()),
    b"s": lambda m: m._set_items([m._pop(), m._pop()][::-1]),
    b"u": lambda m: m._set_items(m._pop_to_mark()),
    b"t": lambda m: m._push(tuple(m._pop_to_mark())),
    b"\x85": lambda m: m._tuple(1),
    b"\x86": lambda m: m._tuple(2),
    b"\x87": lambda m: m._tuple(3),
    b"c": lambda m: m._global(m._line(), m._line()),
    b"\x93": lambda m: m._stack_global(),
    b"R": lambda m: m._reduce(),
    b"b": lambda m: m._build(),
    b"q": lambda m: m._memoize(m._number("B")),
    b"r": lambda m: m._memoize(m._number("I")),
    b"\x94": lambda m: m._memoize(len(m._memo)),
    b"h": lambda m: m._push(m._memo[m._number("B")]),
    b"j": lambda m: m._push(m._memo[m._number("I")]),
}

_HANDLERS = [_OPCODES.get(bytes([code])) for code in range(256)]
"""By the value of the opcode."""
