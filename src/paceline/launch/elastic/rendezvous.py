"""Rendezvous of an elastic run: which nodes take part in each round, between restarts.

The node that serves the store is the leader and always has rank 0: the checkpoints are on its disk,
and no node can join without the store. The leader alone decides which nodes take part, by its own
clock (`RoundLeader`); the others request to join and read its decisions (`ElasticRendezvous`).
Everything in the store is JSON.
"""

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
REQUEST_POLL_SECONDS = 0.5
"""How often a node checks, while its workers train, for requests of the leader."""


class RunEndedError(Exception):
    """A node ended the run; `termination` is None if it finished."""

    def __init__(self, termination: Termination | None) -> None:
        super().__init__(termination.cause if termination else "finished")
        self.termination = termination


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    nodes: list[int]
    """Numbers of the nodes that take part, in the order of their ranks."""
    iteration: int | None
    """Iteration of the checkpoint that it resumes from; None: it starts from the beginning."""

    @classmethod
    def of_message(cls, value: object) -> Round:
        kinds: Kinds = {"number": int, "nodes": list, "iteration": (int, type(None))}
        values = check_fields(value, "round", kinds)
        if not all(isinstance(node, int) for node in values["nodes"]):
            raise MalformedError("round", "bad value of nodes")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A node's request to join a round."""

    number: int
    """The first round that the node can join."""
    cause: dict[str, Any] | None
    """The `Termination` of the node's previous round, unless the leader ended that."""

    @classmethod
    def of_message(cls, value: object) -> JoinRequest:
        kinds: Kinds = {"number": int, "cause": (dict, type(None))}
        request = cls(**check_fields(value, "join request", kinds))
        # Validated here, so that later reads cannot fail.
        _ = request.termination
        return request

    @property
    def termination(self) -> Termination | None:
        return None if self.cause is None else Termination.of_message(self.cause, "join request")


@dataclass(frozen=True, slots=True)
class RestartRequest:
    """The leader's request that a round ends and all nodes join the next one."""

    number: int
    is_planned: bool
    """Whether all workers of the round still run and can agree on a last iteration."""

    @classmethod
    def of_message(cls, value: object) -> RestartRequest:
        return cls(**check_fields(value, "restart request", {"number": int, "is_planned": bool}))


class Leader(Protocol):
    def try_form_round(self) -> None:
        """Form the next round, if enough nodes have joined."""

    def check_round(self) -> None:
        """Request a restart if one is needed."""


class ElasticRendezvous(RendezvousHandler):
    """One node's side of the rendezvous, as a handler of torch's elastic agent."""

    def __init__(self, client: StoreClient, number: int, address: str, port: int) -> None:
        self.leader: Leader | None = None
        self.current: Round | None = None
        self.check_stop: Callable[[], None] = lambda: None
        """Raises if the user stops this node while it waits for others."""
        self._client = client
        self._number = number
        self._where = RendezvousStoreInfo(address, port)
        self._cause: Termination | None = None
        self._checked_at = monotonic()

    def fail(self, cause: Termination | None) -> None:
        """Record why the round failed on this node, for the next join request."""
        self._cause = cause

    def end(self, termination: Termination | None) -> None:
        """End the run on all nodes, unless another node did so before."""
        value = dataclasses.asdict(termination) if termination else None
        self._client.set_once("end", {"termination": value})

    def check_end(self) -> None:
        message = self._client.get("end")
        if message is not None:
            kinds = {"termination": (dict, type(None))}
            value = check_fields(message, "end of the run", kinds)["termination"]
            is_early = value is not None
            raise RunEndedError(
                Termination.of_message(value, "end of the run") if is_early else None
            )

    def restart_request(self) -> RestartRequest | None:
        """The leader's request to end the current round, if any."""
        message = self._client.get("regroup")
        request = None if message is None else RestartRequest.of_message(message)
        is_current = request and self.current and request.number == self.current.number
        return request if is_current else None

    def next_rendezvous(self) -> RendezvousInfo:
        wanted = self.current.number + 1 if self.current else 0
        cause = dataclasses.asdict(self._cause) if self._cause else None
        self._client.set(
            f"application/{self._number}", dataclasses.asdict(JoinRequest(wanted, cause))
        )
        while True:
            self.check_stop()
            self.check_end()
            if self.leader:
                self.leader.try_form_round()
            latest = self._latest_round()
            if latest and latest.number >= wanted and self._number in latest.nodes:
                break
            sleep(POLL_SECONDS)
        self._client.set(f"application/{self._number}", None)
        self.current, self._cause = latest, None
        rank = self.current.nodes.index(self._number)
        # The agent does not use the store: workers connect to it by its address.
        return RendezvousInfo(None, rank, len(self.current.nodes), self._where)  # type: ignore[arg-type]

    def num_nodes_waiting(self) -> int:
        if monotonic() - self._checked_at < REQUEST_POLL_SECONDS:
            return 0
        self._checked_at = monotonic()
        self.check_end()
        if self.leader:
            self.leader.check_round()
        return 1 if self.restart_request() or self._is_outdated() else 0

    def _is_outdated(self) -> bool:
        """Whether the others have started another round without this node."""
        latest = self._latest_round()
        return bool(latest and self.current and latest.number > self.current.number)

    def _latest_round(self) -> Round | None:
        message = self._client.get("round")
        return None if message is None else Round.of_message(message)

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return "paceline"

    def is_closed(self) -> bool:
        return self._client.get("end") is not None

    def set_closed(self) -> None:
        self.end(None)

    def shutdown(self) -> bool:
        return True


LOST_SECONDS = 6.0
"""A node without a heartbeat for this long is lost; long enough for an overloaded machine."""
JOIN_SECONDS = 3.0
"""How long the first round waits for more nodes once the minimum has joined."""


@dataclass(slots=True)
class _Heartbeat:
    count: int
    since: float


class RoundLeader:
    """Decides on the node that serves the store which nodes take part and when to restart."""

    def __init__(
        self,
        config: RunConfig,
        client: StoreClient,
        newest_checkpoint: Callable[[], int | None],
        quiet: bool = False,
    ) -> None:
        limits = config.elastic_limits
        assert limits is not None
        self._min_nodes, self._max_nodes = limits
        self._config = config
        self._client = client
        self._newest_checkpoint = newest_checkpoint
        self._quiet = quiet
        self._started_at = monotonic()
        self._round: Round | None = None
        self._heartbeats: dict[int, _Heartbeat] = {}
        self._forming_since: float | None = None
        self._enough_since: float | None = None
        self._has_reported_waiting = False
        self.worlds: list[dict[str, Any]] = []
        """Each world's first iteration, number of workers and start time."""
        self.restarts: list[dict[str, Any]] = []
        """Each restart after a failure: its cause, the iteration it resumed from, and its time."""

    def check_round(self) -> None:
        """Request the end of the current round if a member is lost or failed, or a node waits."""
        assert self._round is not None
        live = self.live_nodes()
        requests = self._join_requests(live)
        members = self._round.nodes
        broken = any(node not in live or node in requests for node in members)
        joining = len(members) < self._max_nodes and any(node not in members for node in requests)
        if broken or joining:
            restart = RestartRequest(self._round.number, is_planned=not broken)
            self._client.set("regroup", dataclasses.asdict(restart))

    def try_form_round(self) -> None:
        """Form the next round once all live nodes have joined, or enough of them in time."""
        now = monotonic()
        self._forming_since = self._forming_since or now
        live = self.live_nodes()
        requests = self._join_requests(live)
        is_late = now - self._forming_since > self._config.rendezvous_seconds
        if len(requests) < self._min_nodes:
            self._enough_since = None
            if is_late:
                raise RunEndedError(self._too_few(len(requests), self._first_cause(live)))
            self._report_waiting(len(requests), live)
            return
        self._enough_since = self._enough_since or now
        members = self._round.nodes if self._round else []
        missing = [node for node in members if node in live and node not in requests]
        is_complete = now - self._enough_since > JOIN_SECONDS or self._round is not None
        if len(requests) >= self._max_nodes or (is_complete and not missing) or is_late:
            self._begin(sorted(requests)[: self._max_nodes], live)

    def _begin(self, nodes: list[int], live: set[int]) -> None:
        cause = self._first_cause(live)
        allowed = self._config.max_restarts
        if cause and len(self.restarts) == allowed:
            used_up = f" (--max-restarts {allowed} are used up)" if allowed else ""
            raise RunEndedError(dataclasses.replace(cause, cause=f"{cause.cause}{used_up}"))
        number = self._round.number + 1 if self._round else 0
        iteration = self._newest_checkpoint()
        workers = len(nodes) * self._config.nproc_per_node
        moment = {"iteration": iteration or 0, "seconds": monotonic() - self._started_at}
        self.worlds.append({**moment, "workers": workers})
        if cause:
            self.restarts.append({"cause": cause.cause, **moment})
        if self._round is not None:
            joined = len(nodes) > len(self._round.nodes)
            why = "a node joined: resuming" if joined else "resuming"
            if cause:
                why = f"{cause.cause}: restart {len(self.restarts)} of {allowed}"
            begin = "the beginning" if iteration is None else f"iteration {iteration}"
            plural = "s" if workers > 1 else ""
            self._print(f"{why} from {begin} with {workers} worker{plural}")
        self._round = Round(number, nodes, iteration)
        self._forming_since = self._enough_since = None
        self._has_reported_waiting = False
        self._client.set("round", dataclasses.asdict(self._round))

    def _first_cause(self, live: set[int]) -> Termination | None:
        """Why the last round failed; None if the leader only ended it to restart."""
        members = self._round.nodes if self._round else []
        failures = []
        for rank, node in enumerate(members):
            request = self._join_request(node)
            termination = request.termination if request else None
            if termination and termination.status != "stopped":
                lost = f"worker lost on node {rank} ({termination.cause})"
                failures.append(dataclasses.replace(termination, cause=lost))
        known = root_cause(failures)
        if known and not known.is_secondary:
            return known
        for rank, node in enumerate(members):
            if node not in live:
                return Termination(f"node {rank} lost (no heartbeat for {LOST_SECONDS:g} s)")
        return known

    def _too_few(self, nodes: int, cause: Termination | None) -> Termination:
        waited = (
            f"{nodes} of at least {self._min_nodes} nodes joined within"
            f" {self._config.rendezvous_seconds:g} s"
        )
        return Termination(f"{cause.cause}: {waited}" if cause else waited)

    def _report_waiting(self, nodes: int, live: set[int]) -> None:
        # Live nodes are about to join; only report that others are missing.
        if self._has_reported_waiting or nodes < len(live):
            return
        self._has_reported_waiting = True
        self._print(
            f"{nodes} of at least {self._min_nodes} nodes joined: waiting for more, at most"
            f" {self._config.rendezvous_seconds:g} s"
        )

    def _print(self, line: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"paceline: {line}\n")
            sys.stderr.flush()

    def live_nodes(self) -> set[int]:
        """Nodes with a recent heartbeat, by this machine's clock."""
        now = monotonic()
        for node, count in enumerate(self._client.heartbeats()):
            beat = self._heartbeats.get(node)
            if beat is None or beat.count != count:
                self._heartbeats[node] = _Heartbeat(count, now)
        return {node for node, beat in self._heartbeats.items() if now - beat.since < LOST_SECONDS}

    def _join_requests(self, live: set[int]) -> dict[int, JoinRequest]:
        """Requests of live nodes for the next round."""
        found = ((node, self._join_request(node)) for node in live)
        return {node: request for node, request in found if request}

    def _join_request(self, node: int) -> JoinRequest | None:
        message = self._client.get(f"application/{node}")
        request = None if message is None else JoinRequest.of_message(message)
        is_member = self._round is not None and node in self._round.nodes
        if request and is_member and self._round and request.number <= self._round.number:
            return None  # for the current round, which it is about to start
        return request
