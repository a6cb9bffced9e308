"""Text as byte tokens: windows of fixed length, and the loader of `text:PATH`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paceline.config.run_config import DEFAULT_CONTEXT, DEFAULT_TEXT_TEST_FRACTION
from paceline.data.dataset import Dataset, LoadRequest, Split, TokenTransform
from paceline.errors import ConfigError, DataError

VOCABULARY = 256
BYTES = TokenTransform(is_bytes=True)

_READ_BYTES = 1 << 24


def windows(tokens: Tensor, context: int) -> Split:
    """Cut a stream of tokens into samples of `context` tokens; the targets are the next tokens.

    Both are views of the stream. The tokens after the last complete sample are not used.
    """
    samples = (len(tokens) - 1) // context
    used = samples * context
    inputs, targets = tokens[:used], tokens[1 : used + 1]
    return Split(inputs.view(samples, context), targets.view(samples, context))


def load_text(request: LoadRequest) -> Dataset:
    """Load a UTF-8 file or a folder of files; its end is the test set."""
    path = Path(request.path).expanduser()
    try:
        tokens = _read(path, request.resident_limit_bytes)
    except OSError as error:
        raise DataError(
            f"data text: cannot read {error.filename or path}: {error.strerror or error}"
        ) from None
    fraction = request.text_test_fraction or DEFAULT_TEXT_TEST_FRACTION
    context = request.context or DEFAULT_CONTEXT
    test_bytes = round(len(tokens) * fraction)
    parts = {"train": tokens[: len(tokens) - test_bytes], "test": tokens[-test_bytes:]}
    if test_bytes == 0:
        parts["test"] = tokens[:0]
    shortest = min(parts, key=lambda name: len(parts[name]))
    longest_context = len(parts[shortest]) - 1
    sizes = f"{len(parts[shortest]):,} of {len(tokens):,} bytes"
    if longest_context < 1:
        raise ConfigError([f"--data: the {shortest} set of {path} has {sizes}: use more text"])
    if context > longest_context:
        raise ConfigError(
            [
                f"--context: must be at most {longest_context:,} for the {shortest} set of {path}"
                f" ({sizes}), got {context:,}"
            ]
        )
    train, test = (windows(part, context) for part in parts.values())
    return Dataset(f"text:{request.path}", train, test, VOCABULARY, BYTES)


def _read(path: Path, limit_bytes: int) -> Tensor:
    """Return the bytes of a file, or of all files of a folder in the order of their names."""
    files = _files_in(path) if path.is_dir() else [path]
    for file in files:
        _check_utf8(file)
    size_bytes = sum(file.stat().st_size for file in files)
    if not size_bytes:
        raise DataError(f"data text: {path} has no text")
    if size_bytes <= limit_bytes:
        text = b"".join(_separated(files))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(files) > 1:
        raise DataError(
            f"data text: {path} is larger than --resident-limit-mib: join its files into one,"
            " which can be memory-mapped, or raise the limit"
        )
    return torch.from_file(str(files[0]), shared=False, size=size_bytes, dtype=torch.uint8)


def _files_in(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, without hidden ones."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _separated(files: list[Path]) -> Iterator[bytes]:
    """Yield the bytes of files, with a line break where the next file would continue a line."""
    for number, file in enumerate(files, 1):
        text = file.read_bytes()
        yield text
        if number < len(files) and not text.endswith(b"\n"):
            yield b"\n"


def _check_utf8(file: Path) -> None:
    """Raise DataError unless a file is UTF-8; reads it in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    checked = 0
    with file.open("rb") as stream:
        while True:
            part = stream.read(_READ_BYTES)
            try:
                decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                at = max(checked + error.start - (len(error.object) - len(part)), 0)
                raise DataError(
                    f"data text: {file} is not UTF-8 (byte {at:,}): convert it, for example with"
                    " iconv, or pass your own tokens by a data function"
                ) from None
            checked += len(part)
            if not part:
                return
