"""How a run ended, for whoever started it."""

from __future__ import annotations

from typing import NamedTuple

from paceline.records import Result, RunFolder


class Outcome(NamedTuple):
    folder: RunFolder
    result: Result | None
    """None in a process that is one worker of several: the first one has the result."""
    exit_code: int
