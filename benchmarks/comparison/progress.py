"""A line on the error stream that says what takes time, so that tables stay clean."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic


@contextmanager
def progress(what: str) -> Iterator[None]:
    began = monotonic()
    sys.stdout.flush()  # What was found before stands before.
    print(f"  ... {what}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f" ({monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
