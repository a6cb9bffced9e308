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
_FOLDERS = sysconfig.get_paths()
PACKAGES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(_FOLDERS[name] for name in ("purelib", "platlib")),
    )
)
NOT_OF_SCRIPT = (
    *PACKAGES,
    *(f"{_FOLDERS[name]}{os.sep}" for name in ("stdlib", "platstdlib")),
    TORCH,
    PACELINE,
    "<",
)


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """A line of the script, from which a function of torch is called."""

    file: str
    number: int
    library: tuple[str, int] | None = None
    """The file, relative to site-packages, and the line, if an installed library calls it."""

    def to_record(self) -> dict[str, Any]:
        code = linecache.getline(self.file, self.number).strip()
        record: dict[str, Any] = {"file": self.file, "line": self.number, "code": code}
        if self.library is not None:
            record["library"] = dict(zip(("file", "line"), self.library, strict=True))
        return record


@dataclass(slots=True)
class CallSite:
    """Calls of one function from one line."""

    call: str
    line: ScriptLine | None
    """None for one that is not counted."""
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
            **(self.line.to_record() if self.line else {}),
            "count": self.count,
            "steps": self.steps,
            "seconds": round(self.seconds, 6),
            "bytes": self.bytes,
        }


def is_within(frame: FrameType, folder: str) -> bool:
    return frame.f_code.co_filename.startswith(folder)


def script_line(frame: FrameType) -> ScriptLine:
    """The innermost line that is not in an installed library; without one, that of the frame."""
    library: tuple[str, int] | None = None
    found: FrameType | None = frame
    while found is not None:
        file = found.f_code.co_filename
        if not file.startswith(NOT_OF_SCRIPT):
            return ScriptLine(file, found.f_lineno, library)
        if library is None and not file.startswith((TORCH, PACELINE)):
            folder = next((one for one in PACKAGES if file.startswith(one)), None)
            library = (file[len(folder) :], found.f_lineno) if folder else None
        found = found.f_back
    return ScriptLine(frame.f_code.co_filename, frame.f_lineno)
