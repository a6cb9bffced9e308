"""Which nodes take part in an elastic run, as the leader decides, with a simulated clock."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from threading import Event
from typing import Any, cast

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # torch lists neither

from paceline.config import from_mapping
from paceline.launch.elastic import rendezvous as leaders
from paceline.launch.elastic import store_client as contacts
from paceline.launch.elastic.agent import ElasticAgent
from paceline.launch.elastic.rendezvous import (
    JOIN_SECONDS,
    LOST_SECONDS,
    ElasticRendezvous,
    JoinRequest,
    RoundLeader,
    RunEndedError,
)
from paceline.launch.elastic.store_client import LostContactError, StoreClient
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import Termination

WAIT_SECONDS = 50.0
KILLED = Termination("rank 2 was killed by SIGKILL", ended=5.0)
ECHO = Termination(
    "rank 0: all_reduce with rank 2: connection closed", is_secondary=True, ended=4.0
)


def _beat(store: Store, node: int) -> None:
    store.add(f"beat/{node}", 1)


class Table:
    """A leader and the nodes in its store; nodes send heartbeats unless they are lost."""

    def __init__(self, client: StoreClient, monkeypatch: pytest.MonkeyPatch, elastic: str) -> None:
        self.client = client
        self.seconds = 1000.0
        self.checkpoint: int | None = None
        self.lost: set[int] = set()
        self._nodes = 0
        monkeypatch.setattr(leaders, "monotonic", lambda: self.seconds)
        settings = {"elastic": elastic, "max_restarts": 2, "rendezvous_seconds": WAIT_SECONDS}
        config = from_mapping({**settings, "nproc_per_node": 2})
        self.leader = RoundLeader(config, client, lambda: self.checkpoint)

    def come(self, count: int) -> None:
        self._nodes += count
        self.client.ask(lambda store: store.add("nodes", count))

    def apply(self, *nodes: int, number: int = 0, cause: Termination | None = None) -> None:
        message = dataclasses.asdict(cause) if cause else None
        for node in nodes:
            application = dataclasses.asdict(JoinRequest(number, message))
            self.client.set(f"application/{node}", application)

    def withdraw(self) -> None:
        """All nodes have started the latest round."""
        for node in range(self._nodes):
            self.client.set(f"application/{node}", None)

    def pass_time(self, seconds: float, consider: bool = True) -> None:
        """In steps that are shorter than a node may be silent."""
        for _ in range(round(seconds)):
            self.seconds += 1.0
            for node in set(range(self._nodes)) - self.lost:
                self.client.ask(partial(_beat, node=node))
            self.leader.try_form_round() if consider else self.leader.live_nodes()

    @property
    def nodes(self) -> list[int] | None:
        message = self.client.get("round")
        return message["nodes"] if message else None

    def begin(self, count: int) -> None:
        """A first round of all."""
        self.come(count)
        self.apply(*range(count))
        self.pass_time(JOIN_SECONDS + 2)
        assert self.nodes == list(range(count))
        self.withdraw()


@pytest.fixture
def client() -> Iterator[StoreClient]:
    with closing(StoreClient(HashStore(), "here")) as client:
        yield client


@pytest.fixture
def table(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(client, monkeypatch, "2:3")


def test_the_first_round_waits_a_moment_for_more_than_the_fewest(table: Table) -> None:
    table.come(3)
    table.apply(0, 1)
    table.pass_time(JOIN_SECONDS)
    assert table.nodes is None
    table.pass_time(2)
    assert table.nodes == [0, 1]


def test_a_round_starts_at_once_when_no_other_node_can_join(table: Table) -> None:
    table.come(3)
    table.apply(0, 1, 2)
    table.pass_time(1)
    assert table.nodes == [0, 1, 2]


def test_a_round_waits_for_live_nodes_and_starts_without_lost_ones(table: Table) -> None:
    table.begin(3)
    table.apply(0, 2, number=1, cause=ECHO)
    table.pass_time(LOST_SECONDS + 5)
    assert table.client.get("round")["number"] == 0, "node 1 lives, and has not come yet"
    table.lost = {1}
    table.pass_time(LOST_SECONDS + 1)
    assert table.client.get("round") == {"number": 1, "nodes": [0, 2], "iteration": None}
    [restart] = table.leader.restarts
    assert restart["cause"] == "node 1 lost (no heartbeat for 6 s)"


def test_the_cause_of_a_restart_is_no_echo(table: Table, capfd: pytest.CaptureFixture[str]) -> None:
    table.begin(3)
    table.checkpoint = 150
    table.apply(0, 2, number=1, cause=ECHO)
    table.apply(1, number=1, cause=KILLED)
    table.pass_time(1)
    line = "worker lost on node 1 (rank 2 was killed by SIGKILL): restart 1 of 2 from iteration 150"
    assert capfd.readouterr().err == f"paceline: {line} with 6 workers\n"


def test_a_joining_node_causes_a_planned_round_that_is_not_a_restart(table: Table) -> None:
    table.begin(2)
    table.come(1)
    table.pass_time(1, consider=False)
    table.leader.check_round()
    assert table.client.get("regroup") is None
    table.apply(2)
    table.leader.check_round()
    assert table.client.get("regroup") == {"number": 0, "is_planned": True}
    stopped = Termination("stopped by another worker", 130, "stopped", is_secondary=True)
    table.apply(0, 1, number=1, cause=stopped)
    table.pass_time(1)
    assert (table.nodes, table.leader.restarts) == ([0, 1, 2], [])


def test_a_waiting_node_replaces_a_lost_one_and_does_not_disturb_a_full_world(
    table: Table,
) -> None:
    table.begin(3)
    table.come(1)
    table.apply(3)
    table.pass_time(1, consider=False)
    table.leader.check_round()
    assert table.client.get("regroup") is None
    table.lost = {1}
    table.pass_time(LOST_SECONDS + 1, consider=False)
    table.leader.check_round()
    assert table.client.get("regroup") == {"number": 0, "is_planned": False}
    table.apply(0, 2, number=1, cause=ECHO)
    table.pass_time(1)
    assert table.nodes == [0, 2, 3]


def test_too_few_nodes_end_the_run_with_its_cause(table: Table) -> None:
    table.begin(2)
    table.lost = {1}
    table.apply(0, number=1, cause=ECHO)
    with pytest.raises(RunEndedError) as caught:
        table.pass_time(WAIT_SECONDS + 2)
    assert str(caught.value) == (
        "node 1 lost (no heartbeat for 6 s): 1 of at least 2 nodes joined within 50 s"
    )


def test_restarts_are_counted_and_limited(table: Table) -> None:
    table.begin(2)
    for number in (1, 2):
        table.apply(0, 1, number=number, cause=KILLED)
        table.pass_time(1)
        assert len(table.leader.restarts) == number
    table.apply(0, 1, number=3, cause=KILLED)
    with pytest.raises(RunEndedError) as caught:
        table.pass_time(1)
    assert caught.value.termination == dataclasses.replace(
        KILLED, cause=f"worker lost on node 0 ({KILLED.cause}) (--max-restarts 2 are used up)"
    )


def test_the_first_to_end_the_run_gives_the_cause(client: StoreClient) -> None:
    one, other = (ElasticRendezvous(client, number, "127.0.0.1", 1) for number in range(2))
    one.end(KILLED)
    other.end(ECHO)
    with pytest.raises(RunEndedError) as caught:
        other.check_end()
    assert caught.value.termination == KILLED


class Silent:
    """A store whose machine has lost its link: it neither answers nor fails."""

    def __init__(self) -> None:
        self.link = Event()

    def add(self, *_: Any) -> int:
        self.link.wait(20)
        return 1


def test_a_first_node_that_falls_silent_is_lost_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contacts, "CLOSING_SECONDS", 0.0)
    store = Silent()
    with closing(StoreClient(cast("Store", store), "10.0.0.1:29500")) as client:
        with pytest.raises(LostContactError, match="lost contact with the first node"):
            client.ask(lambda store: store.add("nodes", 0), limit_seconds=0.05)
        with pytest.raises(LostContactError):
            client.get("round")
        store.link.set()


class Stopped:
    """Workers that a signal has ended before they began to train, and what the others saw of it."""

    def __init__(self, code: int, termination: Termination) -> None:
        self._code, self._ending = code, termination

    def terminate(self, grace_seconds: float) -> dict[int, int | None]:
        return {0: self._code}

    def termination(self, codes: Any, signals: Any) -> Termination:
        return self._ending


@pytest.mark.parametrize(
    ("code", "termination", "is_failure"),
    [
        (-signal.SIGTERM, Termination("rank 0 was killed by SIGTERM"), False),
        (130, Termination("stopped by SIGTERM", 130, "stopped"), False),
        (1, ECHO, False),
        (1, KILLED, True),
    ],
)
def test_what_a_planned_regrouping_does_to_workers_is_no_failure(
    code: int, termination: Termination, is_failure: bool, client: StoreClient
) -> None:
    rounds = ElasticRendezvous(client, 0, "127.0.0.1", 1)
    agent = ElasticAgent(rounds, 1, lambda *_: cast("NodeWorkers", None), SignalMonitor())
    agent.workers = cast("NodeWorkers", Stopped(code, termination))
    assert agent._end_round(is_planned=True) == (termination if is_failure else None)
    assert agent._end_round(is_planned=False) == termination
