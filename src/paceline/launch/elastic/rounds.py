"""Rounds of an elastic run: which nodes take part, from one restart to the next.

The node that serves the store leads, and always has rank 0: the checkpoints are on its disk, and
without the store nobody could meet. It alone decides who takes part (leader.py), by its own clock;
the others apply and are told. Everything in the store is JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.launch.elastic.contact import Contact
from paceline.launch.ending import Ending
from paceline.launch.messages import Kinds, MalformedError, check_fields

POLL_SECONDS = 0.1
NEWS_SECONDS = 0.5
"""How often a node looks, while its workers train, for what the others want."""


class RunOverError(Exception):
    """Somebody has ended the whole run; `ending` is None where it came to its end."""

    def __init__(self, ending: Ending | None) -> None:
        super().__init__(ending.cause if ending else "finished")
        self.ending = ending


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    nodes: list[int]
    """The numbers of those who take part, in the order of their ranks."""
    iteration: int | None
    """Of the checkpoint that it goes on from; None: from the beginning."""

    @classmethod
    def of_message(cls, value: object) -> Round:
        kinds: Kinds = {"number": int, "nodes": list, "iteration": (int, type(None))}
        values = check_fields(value, "round", kinds)
        if not all(isinstance(node, int) for node in values["nodes"]):
            raise MalformedError("round", "bad value of nodes")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Application:
    """For a round; `number` is the round's, of which the node has seen those before."""

    number: int
    cause: dict[str, Any] | None
    """The `Ending` of the node's part of the round before, unless it was asked to regroup."""

    @classmethod
    def of_message(cls, value: object) -> Application:
        kinds: Kinds = {"number": int, "cause": (dict, type(None))}
        application = cls(**check_fields(value, "application", kinds))
        # Checked here, so that whoever reads it later need not.
        _ = application.ending
        return application

    @property
    def ending(self) -> Ending | None:
        return None if self.cause is None else Ending.of_message(self.cause, "application")


@dataclass(frozen=True, slots=True)
class Regrouping:
    """The leader's wish that a round ends."""

    number: int
    is_planned: bool
    """Whether all workers of the round can still agree where to stop."""

    @classmethod
    def of_message(cls, value: object) -> Regrouping:
        return cls(**check_fields(value, "regrouping", {"number": int, "is_planned": bool}))


class Leads(Protocol):
    def consider(self) -> None:
        """Form the next round, if it is time."""

    def watch(self) -> None:
        """Ask for a regrouping where one is needed."""


class Rounds(RendezvousHandler):
    """One node's part in the rounds, in the shape that torch's elastic agent wants."""

    def __init__(self, contact: Contact, number: int, address: str, port: int) -> None:
        self.leader: Leads | None = None
        self.current: Round | None = None
        self.check_stop: Callable[[], None] = lambda: None
        """Raises where the user has asked this node to stop while it waits for others."""
        self._contact = contact
        self._number = number
        self._where = RendezvousStoreInfo(address, port)
        self._cause: Ending | None = None
        self._looked = monotonic()

    def fail(self, cause: Ending | None) -> None:
        """Note why the node's part of the round ended, to be told with the next application."""
        self._cause = cause

    def end(self, ending: Ending | None) -> None:
        """End the run for all, unless another one did so before."""
        self._contact.set_once("end", {"ending": dataclasses.asdict(ending) if ending else None})

    def check_end(self) -> None:
        told = self._contact.get("end")
        if told is not None:
            kinds = {"ending": (dict, type(None))}
            ending = check_fields(told, "end of the run", kinds)["ending"]
            is_early = ending is not None
            raise RunOverError(Ending.of_message(ending, "end of the run") if is_early else None)

    def regrouping(self) -> Regrouping | None:
        """What the leader wants of the current round."""
        told = self._contact.get("regroup")
        wish = None if told is None else Regrouping.of_message(told)
        return wish if wish and self.current and wish.number == self.current.number else None

    def next_rendezvous(self) -> RendezvousInfo:
        wanted = self.current.number + 1 if self.current else 0
        cause = dataclasses.asdict(self._cause) if self._cause else None
        self._contact.set(
            f"application/{self._number}", dataclasses.asdict(Application(wanted, cause))
        )
        while True:
            self.check_stop()
            self.check_end()
            if self.leader:
                self.leader.consider()
            told = self._round()
            if told and told.number >= wanted and self._number in told.nodes:
                break
            sleep(POLL_SECONDS)
        self._contact.set(f"application/{self._number}", None)
        self.current, self._cause = told, None
        rank = self.current.nodes.index(self._number)
        # The agent gives the store to nobody: workers find theirs at the address.
        return RendezvousInfo(None, rank, len(self.current.nodes), self._where)  # type: ignore[arg-type]

    def num_nodes_waiting(self) -> int:
        if monotonic() - self._looked < NEWS_SECONDS:
            return 0
        self._looked = monotonic()
        self.check_end()
        if self.leader:
            self.leader.watch()
        return 1 if self.regrouping() or self._is_outdated() else 0

    def _is_outdated(self) -> bool:
        """Whether the others have begun another round without this node."""
        told = self._round()
        return bool(told and self.current and told.number > self.current.number)

    def _round(self) -> Round | None:
        """The one that the leader formed last."""
        told = self._contact.get("round")
        return None if told is None else Round.of_message(told)

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return "paceline"

    def is_closed(self) -> bool:
        return self._contact.get("end") is not None

    def set_closed(self) -> None:
        self.end(None)

    def shutdown(self) -> bool:
        return True
