"""PyTorch's flight recorder: the last collectives of this process, which C++ records itself.

It knows what was called and when, and what has not ended, but not when the rest ended. Reading it
takes many milliseconds, so that is for a program that does not train.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch._C import _distributed_c10d

from paceline.profiler.collectives.log import OPERATIONS

ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4,
    "Long": 8, "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
"""By the names of C++."""

FROM_OUTPUTS = ("all_gather", "gather", "reduce_scatter")


class TracedCall(NamedTuple):
    group: str
    number: int
    """Counts the collectives of the group from 1, as the group itself does."""
    operation: int
    size_bytes: int
    arrival: float
    """By `perf_counter`."""
    has_ended: bool


def read_calls(after: Mapping[str, int]) -> list[TracedCall]:
    """The collectives of some groups after the given numbers, as far as they are still known.

    Empty if this version of PyTorch has no flight recorder, or it is switched off.
    """
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        return []
    to_clock = time.perf_counter() - time.time()
    trace = pickle.loads(dump(includeStackTraces=False))  # noqa: S301 - of this process
    calls = []
    for entry in trace.get("entries", ()):
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if name in after and number > after[name] and not entry["is_p2p"]:
            operation = entry["profiling_name"].rpartition(":")[2]
            if operation in OPERATIONS:
                calls.append(
                    TracedCall(
                        name,
                        number,
                        OPERATIONS.index(operation),
                        _size_bytes(operation, entry),
                        entry["time_created_ns"] / 1e9 + to_clock,
                        bool(entry["retired"]),
                    )
                )
    return calls


def _size_bytes(operation: str, entry: Mapping[str, Any]) -> int:
    """Of the whole tensor, as in the log."""
    of = "output" if operation in FROM_OUTPUTS else "input"
    sizes, types = entry[f"{of}_sizes"], entry[f"{of}_dtypes"]
    return sum(
        math.prod(size) * ELEMENT_BYTES.get(kind, 0)
        for size, kind in zip(sizes, types, strict=False)
    )


def number_of(group: Any) -> int | None:
    """How many collectives a group was called for; None if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None
