"""Termination of processes: why each ended early, and the choice of a failed run's root cause.

Each process reports its termination to the launcher through a file or through the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists neither of them
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.comm.rank_info import RankInfo
from paceline.errors import PacelineError, PeerError, RunError, from_exit_code
from paceline.launch import environment
from paceline.launch.messages import Kinds, MalformedError, check_fields, clean_cause, decode
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.training.rank_report import RankReport, explain

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Termination:
    cause: str
    exit_code: int = 1
    status: str = "failed"
    is_secondary: bool = False
    """Whether it is a consequence of a failure elsewhere."""
    ended: float = 0.0
    """Unix time by this machine's clock; 0 if unknown."""
    is_loss: bool = False
    """Whether a process or a machine was lost, so that a restart may succeed."""
    order: int = 0
    """The store's count of failures when it was noticed, common to all nodes; 0: unknown."""

    @classmethod
    def of_report(cls, report: RankReport) -> Termination:
        cause = report.cause or "a worker failed"
        return cls(cause, report.exit_code, report.status, report.is_secondary, report.ended)

    @classmethod
    def of_message(cls, value: object, what: str) -> Termination:
        """Parse what another process sent; MalformedError if it is not a termination."""
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
"""Types of the fields, for terminations that other processes send."""


def root_cause(terminations: Iterable[Termination]) -> Termination | None:
    """The root cause: errors before losses, losses before consequences, then the earliest.

    Those of different machines are ordered by the store's count, because clocks differ; those of
    one machine that were noticed together, by its clock. Those without a count come last.
    """
    return min(
        terminations,
        key=lambda each: (each.is_secondary, each.is_loss, each.order or math.inf, each.ended),
        default=None,
    )


def write_failure(folder: RunFolder, rank: int, termination: Termination) -> None:
    write_json(folder.failure_file(rank), {"schema": SCHEMA, **dataclasses.asdict(termination)})


def read_failure(folder: RunFolder, rank: int) -> Termination | None:
    file = folder.failure_file(rank)
    if not file.exists():
        return None
    values = read_json(file)
    del values["schema"]
    return Termination.of_message(values, file.name)


def read_failures(
    folder: RunFolder,
    ranks: Iterable[int],
    orders: Mapping[int, int],
    board: FailureBoard | None,
) -> list[Termination]:
    """Failures of this node's processes, from files or, if a disk was full, from the board."""
    failures = []
    for rank in ranks:
        failure = read_failure(folder, rank)
        if failure is None and board and rank in orders:
            failure = board.read(rank)
        if failure:
            failures.append(dataclasses.replace(failure, order=orders.get(rank, 0)))
    return failures


POST_SECONDS = 3.0
"""How long a worker tries to reach the store; after a failure it is killed soon."""


class StoreCall(Protocol):
    """Runs an action with the store; RunError if the store is gone."""

    def __call__(self, action: Callable[[Store], T]) -> T: ...


class FailureBoard:
    """Failures of one attempt in the store: their order on all nodes, and causes without a file.

    If the store is gone, nothing is known and nothing is raised.
    """

    def __init__(self, ask: StoreCall, attempt: int = 0) -> None:
        self._ask = ask
        self._attempt = attempt

    def next_order(self) -> int:
        """A number that grows with each failure on any node; 0 if the store is gone."""
        with contextlib.suppress(RunError):
            return self._ask(lambda store: store.add("failures", 1))
        return 0

    def read(self, rank: int) -> Termination | None:
        """The failure that a process posted, if any."""
        key = _key(self._attempt, rank)

        def look(store: Store) -> Any:
            return decode(store.get(key), f"failure of rank {rank}") if store.check([key]) else None

        try:
            value = self._ask(look)
            return (
                None if value is None else Termination.of_message(value, f"failure of rank {rank}")
            )
        except MalformedError as error:
            return Termination(str(error), is_secondary=True)
        except RunError:
            return None


def report_failure(error: BaseException, folder: RunFolder) -> int:
    """Report to the launcher why this process failed; returns its exit code."""
    rank_info = environment.detect()
    assert rank_info is not None
    status, cause, code = explain(error, folder)
    is_secondary = isinstance(error, PacelineError) and error.is_secondary
    noticed_at = error.noticed_at if isinstance(error, PeerError) else None
    termination = Termination(cause, code, status, is_secondary, noticed_at or time.time())
    try:
        write_failure(folder, rank_info.rank, termination)
    except OSError:
        post_failure(rank_info, termination)
    return code


def post_failure(rank_info: RankInfo, termination: Termination) -> None:
    """Report a failure through the store, because the run folder cannot be written to."""
    with contextlib.suppress(RuntimeError):
        store = TCPStore(
            rank_info.master_addr,
            rank_info.master_port,
            is_master=False,
            timeout=timedelta(seconds=POST_SECONDS),
            wait_for_workers=False,
        )
        for prefix in ("nodes", "elastic"):
            value = json.dumps(dataclasses.asdict(termination))
            PrefixStore(prefix, store).set(_key(rank_info.restart_count, rank_info.rank), value)


def _key(attempt: int, rank: int) -> str:
    return f"failure/{attempt}/{rank}"
