"""Files on their way to the first node, through the store at which the nodes meet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

PART_BYTES = 4 << 20
"""A file travels in parts of this size; the store takes twice as much at once."""


def send_files(store: Store, node: int, folder: Path, names: Iterable[str]) -> None:
    """Hand in these files of a folder."""
    parts = {}
    for name in names:
        contents = (folder / name).read_bytes()
        begins = range(0, len(contents), PART_BYTES)
        for number, begin in enumerate(begins):
            part = contents[begin : begin + PART_BYTES]
            store.set(f"file/{node}/{name}/{number}", part)  # type: ignore[arg-type]  # it takes both
        parts[name] = len(begins)
    store.set(f"files/{node}", json.dumps(parts))


def receive_files(store: Store, node: int, put: Callable[[str, bytes], object]) -> None:
    """`put` what a node has handed in, file by file; nothing where it has not."""
    if not store.check([f"files/{node}"]):
        return
    for name, parts in json.loads(store.get(f"files/{node}")).items():
        keys = [f"file/{node}/{name}/{number}" for number in range(parts)]
        put(name, b"".join(store.get(key) for key in keys))
