"""Where the package lies, for processes that are started and would not find it by themselves."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def search_path() -> str:
    """A PYTHONPATH by which a new process finds this very package, and a user's own code."""
    return os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH", ""))))
