"""Why a run did not finish, as workers tell their launcher and launchers one another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import PacelineError, from_exit_code
from paceline.launch.messages import Kinds, MalformedError, check_fields, clean_cause
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.training.rank_report import RankReport


@dataclass(frozen=True, slots=True)
class Termination:
    cause: str
    exit_code: int = 1
    status: str = "failed"
    is_secondary: bool = False
    """Whether it is only what was seen of another one's failure."""
    ended: float = 0.0
    """Unix time by this machine's clock; 0 where the process could not say when."""
    is_loss: bool = False
    """Whether a process or a machine went away, which another attempt may survive."""
    order: int = 0
    """The store's count of failures when it was noticed, the same for all nodes; 0: not known."""

    @classmethod
    def of_report(cls, report: RankReport) -> Termination:
        cause = report.cause or "a worker failed"
        return cls(cause, report.exit_code, report.status, report.is_secondary, report.ended)

    @classmethod
    def of_message(cls, value: object, what: str) -> Termination:
        """What another process sent; MalformedError where it is not an ending."""
        values = check_fields(value, what, KINDS)
        if values["status"] not in STATUSES or not 0 < values["exit_code"] < 256:
            raise MalformedError(what, "no such status or exit code")
        return cls(**{**values, "cause": clean_cause(values["cause"], values["exit_code"])})

    def error(self) -> PacelineError:
        return from_exit_code(self.exit_code, self.cause)


STATUSES = ("failed", "diverged", "stopped")
KINDS: Kinds = {
    "cause": str,
    "exit_code": int,
    "status": str,
    "is_secondary": bool,
    "ended": (int, float),
    "is_loss": bool,
    "order": int,
}
"""Types of an ending's fields, for those that other processes send."""


def root_cause(endings: Iterable[Termination]) -> Termination | None:
    """The root cause: errors before losses, losses before echoes, and then the first of its kind.

    Endings of different machines are ordered by the store's count, since clocks differ; those of
    one machine that were noticed together, by its clock. Those without a count come last.
    """
    return min(
        endings,
        key=lambda each: (each.is_secondary, each.is_loss, each.order or math.inf, each.ended),
        default=None,
    )


def write_failure(folder: RunFolder, rank: int, ending: Termination) -> None:
    write_json(folder.failure_file(rank), {"schema": SCHEMA, **dataclasses.asdict(ending)})


def read_failure(folder: RunFolder, rank: int) -> Termination | None:
    file = folder.failure_file(rank)
    if not file.exists():
        return None
    values = read_json(file)
    del values["schema"]
    return Termination.of_message(values, file.name)
