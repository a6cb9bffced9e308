"""Why a run did not come to its end, as workers tell their launcher and launchers one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, PacelineError, RunError, StoppedError
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.worker.report import WorkerReport


@dataclass(frozen=True, slots=True)
class Ending:
    cause: str
    exit_code: int = 1
    status: str = "failed"
    is_echo: bool = False
    """Whether it is only what was seen of another one's failure."""
    ended: float = 0.0
    """Unix time."""
    is_loss: bool = False
    """Whether a process or a machine went away, which another attempt may survive."""

    @classmethod
    def of_report(cls, report: WorkerReport) -> Ending:
        cause = report.cause or "a worker failed"
        return cls(cause, report.exit_code, report.status, report.is_echo, report.ended)

    def error(self) -> PacelineError:
        kinds: dict[int, Callable[[str], PacelineError]] = {
            2: ConfigError.from_text,
            130: StoppedError,
        }
        return kinds.get(self.exit_code, RunError)(self.cause)


def earliest(endings: Iterable[Ending]) -> Ending | None:
    """The first that is no echo of another; where all are, the first of these."""
    return min(endings, key=lambda each: (each.is_echo, each.ended), default=None)


def failure_file(folder: RunFolder, rank: int) -> Path:
    """Where a worker that ends before it could train says why, for its launcher."""
    return folder.path / f"failure-{rank}.json"


def write_failure(folder: RunFolder, rank: int, ending: Ending) -> None:
    write_json(failure_file(folder, rank), {"schema": SCHEMA, **dataclasses.asdict(ending)})


def read_failure(folder: RunFolder, rank: int) -> Ending | None:
    file = failure_file(folder, rank)
    if not file.exists():
        return None
    values = read_json(file)
    del values["schema"]
    return Ending(**values)
