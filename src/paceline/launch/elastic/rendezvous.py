"""Rounds of an elastic run: which nodes take part, from one restart to the next.

The node that serves the store leads, and always has rank 0: the checkpoints are on its disk, and
without the store nobody could meet. It alone decides who takes part (leader.py), by its own clock;
the others apply and are told. Everything in the store is JSON.

The first node of an elastic run: it says which nodes take part, and when to begin anew."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from paceline.config import RunConfig
from paceline.launch.elastic.store_client import StoreClient
from paceline.launch.messages import Kinds, MalformedError, check_fields
from paceline.launch.termination import Termination, root_cause

POLL_SECONDS = 0.1
NEWS_SECONDS = 0.5
"""How often a node looks, while its workers train, for what the others want."""


class RunEndedError(Exception):
    """Somebody has ended the whole run; `ending` is None where it came to its end."""

    def __init__(self, ending: Termination | None) -> None:
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
class JoinRequest:
    """For a round; `number` is the round's, of which the node has seen those before."""

    number: int
    cause: dict[str, Any] | None
    """The `Termination` of the node's part of the round before, unless it was asked to regroup."""

    @classmethod
    def of_message(cls, value: object) -> JoinRequest:
        kinds: Kinds = {"number": int, "cause": (dict, type(None))}
        application = cls(**check_fields(value, "application", kinds))
        # Checked here, so that whoever reads it later need not.
        _ = application.ending
        return application

    @property
    def ending(self) -> Termination | None:
        return None if self.cause is None else Termination.of_message(self.cause, "application")


@dataclass(frozen=True, slots=True)
class RestartRequest:
    """The leader's wish that a round ends."""

    number: int
    is_planned: bool
    """Whether all workers of the round can still agree where to stop."""

    @classmethod
    def of_message(cls, value: object) -> RestartRequest:
        return cls(**check_fields(value, "regrouping", {"number": int, "is_planned": bool}))


class Leads(Protocol):
    def try_form_round(self) -> None:
        """Form the next round, if it is time."""

    def check_round(self) -> None:
        """Ask for a regrouping where one is needed."""


class ElasticRendezvous(RendezvousHandler):
    """One node's part in the rounds, in the shape that torch's elastic agent wants."""

    def __init__(self, contact: StoreClient, number: int, address: str, port: int) -> None:
        self.leader: Leads | None = None
        self.current: Round | None = None
        self.check_stop: Callable[[], None] = lambda: None
        """Raises where the user has asked this node to stop while it waits for others."""
        self._contact = contact
        self._number = number
        self._where = RendezvousStoreInfo(address, port)
        self._cause: Termination | None = None
        self._looked = monotonic()

    def fail(self, cause: Termination | None) -> None:
        """Note why the node's part of the round ended, to be told with the next application."""
        self._cause = cause

    def end(self, ending: Termination | None) -> None:
        """End the run for all, unless another one did so before."""
        self._contact.set_once("end", {"ending": dataclasses.asdict(ending) if ending else None})

    def check_end(self) -> None:
        told = self._contact.get("end")
        if told is not None:
            kinds = {"ending": (dict, type(None))}
            ending = check_fields(told, "end of the run", kinds)["ending"]
            is_early = ending is not None
            raise RunEndedError(
                Termination.of_message(ending, "end of the run") if is_early else None
            )

    def regrouping(self) -> RestartRequest | None:
        """What the leader wants of the current round."""
        told = self._contact.get("regroup")
        wish = None if told is None else RestartRequest.of_message(told)
        return wish if wish and self.current and wish.number == self.current.number else None

    def next_rendezvous(self) -> RendezvousInfo:
        wanted = self.current.number + 1 if self.current else 0
        cause = dataclasses.asdict(self._cause) if self._cause else None
        self._contact.set(
            f"application/{self._number}", dataclasses.asdict(JoinRequest(wanted, cause))
        )
        while True:
            self.check_stop()
            self.check_end()
            if self.leader:
                self.leader.try_form_round()
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
            self.leader.check_round()
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


LOST_SECONDS = 6.0
"""A node that has not beaten for so long is lost; one that is short of processor time is not."""
LAST_CALL_SECONDS = 3.0
"""How long the first round waits for more nodes than the fewest that will do."""


@dataclass(slots=True)
class _Beat:
    count: int
    since: float


class RoundLeader:
    def __init__(
        self,
        config: RunConfig,
        contact: StoreClient,
        newest_checkpoint: Callable[[], int | None],
        quiet: bool = False,
    ) -> None:
        limits = config.elastic_limits
        assert limits is not None
        self._fewest, self._most = limits
        self._config = config
        self._contact = contact
        self._newest_checkpoint = newest_checkpoint
        self._quiet = quiet
        self._begun = monotonic()
        self._round: Round | None = None
        self._beats: dict[int, _Beat] = {}
        self._forming_since: float | None = None
        self._enough_since: float | None = None
        self._is_waiting_told = False
        self.worlds: list[dict[str, Any]] = []
        """Each with the iteration that it began with, its workers, and when it began."""
        self.restarts: list[dict[str, Any]] = []
        """After failures, each with its cause, the iteration that it went on from, and when."""

    def check_round(self) -> None:
        """While a round goes on: have it end where a member is lost or has failed, or one waits."""
        assert self._round is not None
        living = self.living()
        applications = self._applications(living)
        members = self._round.nodes
        broken = any(node not in living or node in applications for node in members)
        joining = len(members) < self._most and any(node not in members for node in applications)
        if broken or joining:
            wish = RestartRequest(self._round.number, is_planned=not broken)
            self._contact.set("regroup", dataclasses.asdict(wish))

    def try_form_round(self) -> None:
        """Form the next round once all who live have come, or enough of them for long enough."""
        now = monotonic()
        self._forming_since = self._forming_since or now
        living = self.living()
        applications = self._applications(living)
        is_late = now - self._forming_since > self._config.rendezvous_seconds
        if len(applications) < self._fewest:
            self._enough_since = None
            if is_late:
                raise RunEndedError(self._too_few(len(applications), self._first_cause(living)))
            self._tell_waiting(len(applications), living)
            return
        self._enough_since = self._enough_since or now
        members = self._round.nodes if self._round else []
        missing = [node for node in members if node in living and node not in applications]
        called = now - self._enough_since > LAST_CALL_SECONDS or self._round is not None
        if len(applications) >= self._most or (called and not missing) or is_late:
            self._begin(sorted(applications)[: self._most], living)

    def _begin(self, nodes: list[int], living: set[int]) -> None:
        cause = self._first_cause(living)
        allowed = self._config.max_restarts
        if cause and len(self.restarts) == allowed:
            used_up = f" (--max-restarts {allowed} are used up)" if allowed else ""
            raise RunEndedError(dataclasses.replace(cause, cause=f"{cause.cause}{used_up}"))
        number = self._round.number + 1 if self._round else 0
        iteration = self._newest_checkpoint()
        workers = len(nodes) * self._config.nproc_per_node
        moment = {"iteration": iteration or 0, "seconds": monotonic() - self._begun}
        self.worlds.append({**moment, "workers": workers})
        if cause:
            self.restarts.append({"cause": cause.cause, **moment})
        if self._round is not None:
            joined = len(nodes) > len(self._round.nodes)
            why = "a node joined: going on" if joined else "going on"
            if cause:
                why = f"{cause.cause}: restart {len(self.restarts)} of {allowed}"
            begin = "the beginning" if iteration is None else f"iteration {iteration}"
            plural = "s" if workers > 1 else ""
            self._tell(f"{why} from {begin} with {workers} worker{plural}")
        self._round = Round(number, nodes, iteration)
        self._forming_since = self._enough_since = None
        self._is_waiting_told = False
        self._contact.set("round", dataclasses.asdict(self._round))

    def _first_cause(self, living: set[int]) -> Termination | None:
        """Why the last round failed; None where it was only asked to regroup."""
        members = self._round.nodes if self._round else []
        told = []
        for rank, node in enumerate(members):
            application = self._application(node)
            ending = application.ending if application else None
            if ending and ending.status != "stopped":
                lost = f"worker lost on node {rank} ({ending.cause})"
                told.append(dataclasses.replace(ending, cause=lost))
        known = root_cause(told)
        if known and not known.is_secondary:
            return known
        for rank, node in enumerate(members):
            if node not in living:
                return Termination(f"node {rank} lost (no sign of life for {LOST_SECONDS:g} s)")
        return known

    def _too_few(self, nodes: int, cause: Termination | None) -> Termination:
        waited = (
            f"{nodes} of at least {self._fewest} nodes came within"
            f" {self._config.rendezvous_seconds:g} s"
        )
        return Termination(f"{cause.cause}: {waited}" if cause else waited)

    def _tell_waiting(self, nodes: int, living: set[int]) -> None:
        # Those who live will come in a moment; only others are worth a word.
        if self._is_waiting_told or nodes < len(living):
            return
        self._is_waiting_told = True
        self._tell(
            f"{nodes} of at least {self._fewest} nodes came: waiting for more, at most"
            f" {self._config.rendezvous_seconds:g} s"
        )

    def _tell(self, line: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"paceline: {line}\n")
            sys.stderr.flush()

    def living(self) -> set[int]:
        """Nodes that have beaten lately, by this machine's clock."""
        now = monotonic()
        for node, count in enumerate(self._contact.heartbeats()):
            beat = self._beats.get(node)
            if beat is None or beat.count != count:
                self._beats[node] = _Beat(count, now)
        return {node for node, beat in self._beats.items() if now - beat.since < LOST_SECONDS}

    def _applications(self, living: set[int]) -> dict[int, JoinRequest]:
        """Of the living, for the round that comes next."""
        found = ((node, self._application(node)) for node in living)
        return {node: application for node, application in found if application}

    def _application(self, node: int) -> JoinRequest | None:
        told = self._contact.get(f"application/{node}")
        application = None if told is None else JoinRequest.of_message(told)
        is_member = self._round is not None and node in self._round.nodes
        if application and is_member and self._round and application.number <= self._round.number:
            return None  # for the round that it has been given, and is about to begin
        return application
