"""Lines of a script, and what is counted for each."""

from __future__ import annotations

import linecache
import os
import site
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
PACELINE = f"{Path(__file__).parents[2]}{os.sep}"
LIBRARIES = (
    *(f"{folder}{os.sep}" for folder in (*site.getsitepackages(), site.getusersitepackages())),
    *(sysconfig.get_path(name) + os.sep for name in ("purelib", "stdlib", "platstdlib")),
    TORCH,
)


@dataclass(slots=True)
class CallSite:
    """Calls of one function from one line."""

    call: str
    file: str
    line: int
    count: int = 0
    seconds: float = 0.0
    bytes: int = 0
    """Of the tensors of collectives."""
    steps: int = 0
    """Steps with a call."""
    last_step: int = -1
    timed_in_step: int = 0
    skips: int = 0
    """Calls from the last timed one to the next."""
    left: int = 0
    """Of these, calls that are yet to come."""

    def add(self, seconds: float, step: int) -> None:
        """Count a timed call, which stands for those skipped before it, too."""
        calls = 1 + self.skips - self.left
        self.count += calls
        self.seconds += calls * seconds
        if self.last_step != step:
            self.last_step, self.timed_in_step = step, 0
            self.steps += 1
        self.timed_in_step += 1

    def add_skipped(self) -> int:
        """Count the calls since the last timed one like those before it; returns how many."""
        skipped = self.skips - self.left
        self.seconds += skipped * self.seconds / max(1, self.count)
        self.count += skipped
        return skipped

    def to_record(self) -> dict[str, Any]:
        return {
            "call": self.call,
            **describe_line(self.file, self.line),
            "count": self.count,
            "steps": self.steps,
            "seconds": round(self.seconds, 6),
            "bytes": self.bytes,
        }


def is_within(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def script_line(frame: FrameType) -> tuple[str, int]:
    """The innermost line that is not in an installed library; without one, that of the frame."""
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if not file.startswith((*LIBRARIES, PACELINE, "<")):
            return file, found.f_lineno
        found = found.f_back
    return frame.f_code.co_filename, frame.f_lineno


def describe_line(file: str, line: int) -> dict[str, Any]:
    return {"file": file, "line": line, "code": linecache.getline(file, line).strip()}
