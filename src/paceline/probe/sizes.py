"""Sizes of tensors as text: 4k, 1m, 37m; k, m and g are powers of 1024, as memory is counted."""

from __future__ import annotations

import re

from paceline.errors import shown

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
LEAST_BYTES, MOST_BYTES = 4, 8 * 2**30
FIRST_BYTES, LAST_BYTES = 2**10, 2**28
"""Of the sizes that are measured unless others are asked for."""


def parse_size(text: str) -> int:
    """Bytes; ValueError says what would do."""
    match = re.fullmatch(r"([0-9]{1,19})\s*([kmg]?)(i?b)?", text.strip().lower())
    size = int(match[1]) * UNITS[match[2]] if match else 0
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise ValueError(f"a size from 4 to 8g such as 4k, 1m or 256m, got {shown(text)}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """In ascending order, each once."""
    sizes = {parse_size(part) for part in text.split(",") if part.strip()}
    if not sizes:
        raise ValueError("sizes such as 4k,1m,37m")
    return tuple(sorted(sizes))


def doubling(last_bytes: int) -> tuple[int, ...]:
    """From the first size on, each twice the one before, up to a last one."""
    sizes = [FIRST_BYTES]
    while sizes[-1] * 2 <= last_bytes:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if last_bytes >= FIRST_BYTES else (last_bytes,)


def size_text(size_bytes: int) -> str:
    """As short as is exact: 4 KiB, 37 MiB, 1020 B."""
    for letter in ("g", "m", "k"):
        if size_bytes % UNITS[letter] == 0:
            return f"{size_bytes // UNITS[letter]} {letter.upper()}iB"
    return f"{size_bytes} B"
