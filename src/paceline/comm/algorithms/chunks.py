"""A flat tensor cut into as many chunks as there are ranks, which differ by at most one element.

Where the elements do not divide evenly, the first chunks are the larger ones; where there are fewer
elements than ranks, the last chunks are empty.
"""

from __future__ import annotations

from torch import Tensor


def chunk_begin(elements: int, chunks: int, index: int) -> int:
    """The first element of a chunk; that of chunk number `chunks` is the end."""
    small, larger = divmod(elements, chunks)
    return index * small + min(index, larger)


def chunk_elements(elements: int, chunks: int, index: int) -> int:
    """How many elements a chunk has; indices wrap around, as ranks on a ring do."""
    small, larger = divmod(elements, chunks)
    return small + (index % chunks < larger)


def chunk(flat: Tensor, chunks: int, index: int, count: int = 1) -> Tensor:
    """A view of `count` neighbouring chunks from `index` on."""
    elements = flat.numel()
    return flat[chunk_begin(elements, chunks, index) : chunk_begin(elements, chunks, index + count)]
