"""Files on their way to the first node, through the store at which the nodes meet."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.launch.parcel import is_plain

logger = logging.getLogger("paceline")

PART_BYTES = 256 << 10
"""A file travels in parts of this size, which slow links carry between two signs of life."""


def send_files(store: Store, node: int, folder: Path, names: Iterable[str]) -> None:
    """Hand in these files of a folder."""
    for key, part in parts_of(node, folder, names):
        store.set(key, part)  # type: ignore[arg-type]  # it takes both


def parts_of(node: int, folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """What a node has to set in the store, in this order, to hand in these files of a folder."""
    parts = {}
    for name in names:
        contents = (folder / name).read_bytes()
        begins = range(0, len(contents), PART_BYTES)
        for number, begin in enumerate(begins):
            yield f"file/{node}/{name}/{number}", contents[begin : begin + PART_BYTES]
        parts[name] = len(begins)
    yield f"files/{node}", json.dumps(parts).encode()


def receive_files(store: Store, node: int, put: Callable[[str, bytes], object]) -> None:
    """`put` what a node has handed in, file by file; nothing where it has not."""
    if not store.check([f"files/{node}"]):
        return
    for name, parts in json.loads(store.get(f"files/{node}")).items():
        if not is_acceptable(name):
            continue
        keys = [f"file/{node}/{name}/{number}" for number in range(parts)]
        put(name, b"".join(store.get(key) for key in keys))


def is_acceptable(name: object) -> bool:
    """Whether a file that another node hands in stays inside the run's folder; tells if not.

    Anyone who reaches the port could have named it. The run itself is none the worse for that.
    """
    is_fine = isinstance(name, str) and "/" not in name and is_plain(name)
    if not is_fine:
        logger.warning("a run has no file such as %r: not taken from another node", name)
    return is_fine
