"""Files on their way to the first node, through the store at which the nodes meet."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.launch.messages import MalformedError, decode
from paceline.records import RunFolder

logger = logging.getLogger("paceline")

PART_BYTES = 256 << 10
"""A file travels in parts of this size, which slow links carry between two signs of life."""
FILES_MAX = 4096
"""A node hands in a few files for each of its workers."""
PARTS_MAX = 1 << 16
"""16 GiB, far beyond what records take."""


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


def receive_files(
    store: Store, node: int, put: Callable[[str, bytes], object], expected: Container[str]
) -> None:
    """`put` what a node has handed in, file by file; nothing where it has not.

    Only `expected` names are taken. Anyone who reaches the port could have written the rest, which
    is ignored with a warning: the run is none the worse for it.
    """
    if not store.check([f"files/{node}"]):
        return
    try:
        listed = _listed(decode(store.get(f"files/{node}"), f"file list of node {node}"), node)
    except MalformedError as error:
        logger.warning("%s", error)
        return
    for name, parts in listed.items():
        if name not in expected:
            logger.warning(
                "ignored %.80r handed in by node %d: not a file of that node", name, node
            )
            continue
        contents = _contents(store, node, name, parts)
        if contents is None:
            logger.warning("ignored %s from node %d: parts are missing", name, node)
        else:
            put(name, contents)


def _listed(value: object, node: int) -> dict[str, int]:
    """Numbers of parts by file name."""
    what = f"file list of node {node}"
    if not isinstance(value, dict) or len(value) > FILES_MAX:
        raise MalformedError(what, "not a short list of files")
    for name, parts in value.items():
        is_count = isinstance(parts, int) and not isinstance(parts, bool)
        if not is_count or not 0 <= parts <= PARTS_MAX:
            raise MalformedError(what, f"bad number of parts of {name!r:.80}")
    return value


def _contents(store: Store, node: int, name: str, parts: int) -> bytes | None:
    """None where a part is missing or too large."""
    contents = bytearray()
    for number in range(parts):
        key = f"file/{node}/{name}/{number}"
        # To get a key that is not there would wait for it.
        part = store.get(key) if store.check([key]) else None
        if part is None or len(part) > PART_BYTES:
            return None
        contents += part
    return bytes(contents)


def record_names(folder: RunFolder, ranks: Iterable[int], nodes: Iterable[int]) -> set[str]:
    """The names of the files that workers of these ranks, on these nodes, hand in."""
    files = [folder.resources_file(node) for node in nodes]
    for rank in ranks:
        files += [folder.events_file(rank), folder.report_file(rank), folder.trace_file(rank)]
    return {file.name for file in files}
