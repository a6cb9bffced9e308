"""Importing the scripts in benchmarks/, whose recorded results tests check."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """The script `benchmarks/NAME.py` as a module, which other tests cannot import."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for new in set(sys.modules) - before:
            file = getattr(sys.modules[new], "__file__", None)
            if file and Path(file).is_relative_to(FOLDER):
                del sys.modules[new]
