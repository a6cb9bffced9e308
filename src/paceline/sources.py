"""Location of the package, for child processes that could not import it otherwise."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def search_path() -> str:
    """Return a PYTHONPATH with which a child process finds this package and user code."""
    return os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
