"""The agent of one node of an elastic run: torch's, with workers that are a `NodeWorkers` of ours.

torch's agent goes from round to round (rounds.py): meet, start the workers, watch, and when one
fails or another node waits, stop them and meet again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from paceline.errors import StoppedError, UsageError
from paceline.launch.elastic.rendezvous import POLL_SECONDS, ElasticRendezvous, RunEndedError
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.processes import GRACE_SECONDS
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import Termination

PLANNED_SECONDS = 30.0
"""What workers get to agree on a last iteration and to write a checkpoint, when a node joins."""
ENDLESS = 1 << 30
"""Restarts of a node: how many there may be is for the leader to say."""


class ElasticAgent(SimpleElasticAgent):
    def __init__(
        self,
        rounds: ElasticRendezvous,
        local_workers: int,
        make_crew: Callable[[int, int], NodeWorkers],
        interruptions: SignalMonitor,
    ) -> None:
        """`make_crew` is given this node's rank, and how many nodes there are."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=local_workers,
            rdzv_handler=rounds,
            entrypoint="paceline",
            max_restarts=ENDLESS,
            monitor_interval=POLL_SECONDS,
        )
        super().__init__(spec)
        self.crew: NodeWorkers | None = None
        """Of the last round that this node had a part in."""
        self.records: set[str] = set()
        """The names of all files that belong on the first node."""
        self._rounds = rounds
        self._make_crew = make_crew
        self._interruptions = interruptions
        self._forwarded = False

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        local = spec.local_world_size
        world = group_world_size * local
        ranks = range(group_rank * local, (group_rank + 1) * local)
        return [Worker(rank - ranks.start, rank, rank, world, world) for rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.crew is not None:
            self.crew.clear_traces(reports=True)
        # torch declares both as None, which they are before the first round.
        self.crew = self._make_crew(
            cast("int", worker_group.group_rank), cast("int", worker_group.group_world_size)
        )
        self.crew.__enter__()
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.crew is not None
        self._forward_interruptions()
        codes = self.crew.codes()
        if not any(codes.values()) and None not in codes.values():
            ranks = (worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ranks))
        if self.crew.has_failed(codes) or None not in codes.values():
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.HEALTHY)

    def _forward_interruptions(self) -> None:
        """The first Ctrl-C lets the workers agree on a last iteration; the second ends them."""
        assert self.crew is not None
        received = self._interruptions.received
        if received and not self._forwarded:
            self._forwarded = True
            self.crew.signal(received[0])
        if len(received) > 1:
            self.crew.terminate(0.0)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        wish = self._rounds.regrouping()
        is_planned = wish is not None and wish.is_planned
        if is_planned and worker_group.state == WorkerState.HEALTHY:
            self._let_stop()
        ending = self._end_round(is_planned)
        self._stop_workers(worker_group)
        if ending and _is_final(ending):
            raise RunEndedError(ending)
        self._rounds.fail(ending)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _let_stop(self) -> None:
        """Have the workers agree on a last iteration, and leave a checkpoint of it."""
        assert self.crew is not None
        self.crew.signal(signal.SIGTERM)
        deadline = monotonic() + PLANNED_SECONDS
        while monotonic() < deadline and None in self.crew.codes().values():
            sleep(POLL_SECONDS)

    def _end_round(self, is_planned: bool) -> Termination | None:
        """Let the workers come to an end by themselves; why they did, unless it was planned."""
        assert self.crew is not None
        codes = self.crew.terminate(GRACE_SECONDS)
        if not any(codes.values()) and None not in codes.values():
            raise RunEndedError(None)
        ending = self.crew.termination(codes, self._interruptions)
        # Those who had not begun to train are ended by the signal, which others may see.
        stopped = {None, 0, StoppedError.exit_code, -signal.SIGTERM}
        if is_planned and not self._interruptions.received:
            is_as_planned = stopped.issuperset(codes.values()) or (ending and ending.is_secondary)
            return None if is_as_planned else ending
        return ending

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self.crew is not None:
            self.crew.__exit__(None, None, None)
            self.records.update(self.crew.records())

    def _exit_barrier(self) -> None:
        """The workers left together, and the first node sees to it that it leaves last."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's own would look up the machine's full name, which can take long, for nobody.
        return Event(state, source)


def _is_final(ending: Termination) -> bool:
    """Whether trying again would be in vain, or against the user's wish."""
    return (
        ending.exit_code == UsageError.exit_code
        or ending.status == "diverged"
        or (ending.status == "stopped" and not ending.is_secondary)
    )
