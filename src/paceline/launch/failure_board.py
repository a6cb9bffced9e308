"""Failures of workers in the store: their order on all nodes, and causes that the disk refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists neither of them
    PrefixStore,
    Store,
    TCPStore,
)

from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.launch.messages import MalformedError, decode
from paceline.launch.termination import Termination

T = TypeVar("T")

POST_SECONDS = 3.0
"""How long a worker tries to reach the store; after a failure it is ended soon."""


class Asks(Protocol):
    """Runs an action with the store; RunError where the store is gone."""

    def __call__(self, action: Callable[[Store], T]) -> T: ...


class FailureBoard:
    """One attempt's failures. Where the store is gone, nothing is known and nothing is raised."""

    def __init__(self, ask: Asks, attempt: int = 0) -> None:
        self._ask = ask
        self._attempt = attempt

    def next_order(self) -> int:
        """A number that grows with each failure on any node; 0 where the store is gone."""
        with contextlib.suppress(RunError):
            return self._ask(lambda store: store.add("failures", 1))
        return 0

    def read(self, rank: int) -> Termination | None:
        """What a worker posted."""
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


def post_failure(config: RunConfig, place: RankInfo, ending: Termination) -> None:
    """Tell the launcher why this worker failed where the run folder cannot be written to."""
    prefix = "nodes" if config.elastic is None else "elastic"
    with contextlib.suppress(RuntimeError):
        store = TCPStore(
            place.master_addr,
            place.master_port,
            is_master=False,
            timeout=timedelta(seconds=POST_SECONDS),
            wait_for_workers=False,
        )
        value = json.dumps(dataclasses.asdict(ending))
        PrefixStore(prefix, store).set(_key(place.restart_count, place.rank), value)


def _key(attempt: int, rank: int) -> str:
    return f"failure/{attempt}/{rank}"
