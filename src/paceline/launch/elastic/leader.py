"""The first node of an elastic run: it says which nodes take part, and when to begin anew."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from paceline.config import RunConfig
from paceline.launch.elastic.contact import Contact
from paceline.launch.elastic.rounds import Application, Regrouping, Round, RunOverError
from paceline.launch.ending import Ending, earliest

LOST_SECONDS = 6.0
"""A node that has not beaten for so long is lost; one that is short of processor time is not."""
LAST_CALL_SECONDS = 3.0
"""How long the first round waits for more nodes than the fewest that will do."""


@dataclass(slots=True)
class _Beat:
    count: int
    since: float


class Leader:
    def __init__(
        self,
        config: RunConfig,
        contact: Contact,
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

    def watch(self) -> None:
        """While a round goes on: have it end where a member is lost or has failed, or one waits."""
        assert self._round is not None
        living = self.living()
        applications = self._applications(living)
        members = self._round.nodes
        broken = any(node not in living or node in applications for node in members)
        joining = len(members) < self._most and any(node not in members for node in applications)
        if broken or joining:
            wish = Regrouping(self._round.number, is_planned=not broken)
            self._contact.set("regroup", dataclasses.asdict(wish))

    def consider(self) -> None:
        """Form the next round once all who live have come, or enough of them for long enough."""
        now = monotonic()
        self._forming_since = self._forming_since or now
        living = self.living()
        applications = self._applications(living)
        is_late = now - self._forming_since > self._config.rendezvous_seconds
        if len(applications) < self._fewest:
            self._enough_since = None
            if is_late:
                raise RunOverError(self._too_few(len(applications), self._first_cause(living)))
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
            raise RunOverError(dataclasses.replace(cause, cause=f"{cause.cause}{used_up}"))
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

    def _first_cause(self, living: set[int]) -> Ending | None:
        """Why the last round failed; None where it was only asked to regroup."""
        members = self._round.nodes if self._round else []
        told = []
        for rank, node in enumerate(members):
            application = self._application(node)
            ending = application.ending if application else None
            if ending and ending.status != "stopped":
                lost = f"worker lost on node {rank} ({ending.cause})"
                told.append(dataclasses.replace(ending, cause=lost))
        known = earliest(told)
        if known and not known.is_echo:
            return known
        for rank, node in enumerate(members):
            if node not in living:
                return Ending(f"node {rank} lost (no sign of life for {LOST_SECONDS:g} s)")
        return known

    def _too_few(self, nodes: int, cause: Ending | None) -> Ending:
        waited = (
            f"{nodes} of at least {self._fewest} nodes came within"
            f" {self._config.rendezvous_seconds:g} s"
        )
        return Ending(f"{cause.cause}: {waited}" if cause else waited)

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
        for node, count in enumerate(self._contact.beats()):
            beat = self._beats.get(node)
            if beat is None or beat.count != count:
                self._beats[node] = _Beat(count, now)
        return {node for node, beat in self._beats.items() if now - beat.since < LOST_SECONDS}

    def _applications(self, living: set[int]) -> dict[int, Application]:
        """Of the living, for the round that comes next."""
        found = ((node, self._application(node)) for node in living)
        return {node: application for node, application in found if application}

    def _application(self, node: int) -> Application | None:
        told = self._contact.get(f"application/{node}")
        application = None if told is None else Application.of_message(told)
        is_member = self._round is not None and node in self._round.nodes
        if application and is_member and self._round and application.number <= self._round.number:
            return None  # for the round that it has been given, and is about to begin
        return application
