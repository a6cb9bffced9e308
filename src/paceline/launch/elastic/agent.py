"""The agent of one node of an elastic run: torch's elastic agent over `NodeWorkers`.

torch's agent goes from round to round (rendezvous.py): join, start the workers, monitor them, and
when one fails or another node waits, stop them and join the next round.
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
"""Time for workers to agree on a last iteration and write a checkpoint, when a node joins."""
MAX_RESTARTS = 1 << 30
"""No limit on a node: the leader limits the restarts of the run."""


class ElasticAgent(SimpleElasticAgent):
    def __init__(
        self,
        rounds: ElasticRendezvous,
        local_workers: int,
        make_workers: Callable[[int, int], NodeWorkers],
        signals: SignalMonitor,
    ) -> None:
        """`make_workers` gets this node's rank and the number of nodes."""
        spec = WorkerSpec(
            role="worker",
            local_world_size=local_workers,
            rdzv_handler=rounds,
            entrypoint="paceline",
            max_restarts=MAX_RESTARTS,
            monitor_interval=POLL_SECONDS,
        )
        super().__init__(spec)
        self.workers: NodeWorkers | None = None
        """Of the last round that this node took part in."""
        self.records: set[str] = set()
        """Names of the files to send to node 0."""
        self._rounds = rounds
        self._make_workers = make_workers
        self._signals = signals
        self._forwarded = False

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        local = spec.local_world_size
        world = group_world_size * local
        ranks = range(group_rank * local, (group_rank + 1) * local)
        return [Worker(rank - ranks.start, rank, rank, world, world) for rank in ranks]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self.workers is not None:
            self.workers.remove_transient(reports=True)
        # torch declares both as optional, because they are None before the first round.
        self.workers = self._make_workers(
            cast("int", worker_group.group_rank), cast("int", worker_group.group_world_size)
        )
        self.workers.__enter__()
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self.workers is not None
        self._forward_interruptions()
        codes = self.workers.codes()
        if not any(codes.values()) and None not in codes.values():
            ranks = (worker.global_rank for worker in worker_group.workers)
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(ranks))
        if self.workers.has_failed(codes) or None not in codes.values():
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.HEALTHY)

    def _forward_interruptions(self) -> None:
        """The first Ctrl-C lets the workers agree on a last iteration; the second kills them."""
        assert self.workers is not None
        received = self._signals.received
        if received and not self._forwarded:
            self._forwarded = True
            self.workers.signal(received[0])
        if len(received) > 1:
            self.workers.terminate(0.0)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        request = self._rounds.restart_request()
        is_planned = request is not None and request.is_planned
        if is_planned and worker_group.state == WorkerState.HEALTHY:
            self._stop_gracefully()
        termination = self._end_round(is_planned)
        self._stop_workers(worker_group)
        if termination and _is_final(termination):
            raise RunEndedError(termination)
        self._rounds.fail(termination)
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _stop_gracefully(self) -> None:
        """Let the workers agree on a last iteration and write a checkpoint of it."""
        assert self.workers is not None
        self.workers.signal(signal.SIGTERM)
        deadline = monotonic() + PLANNED_SECONDS
        while monotonic() < deadline and None in self.workers.codes().values():
            sleep(POLL_SECONDS)

    def _end_round(self, is_planned: bool) -> Termination | None:
        """Wait for the workers to end; returns why they did, unless it was planned."""
        assert self.workers is not None
        codes = self.workers.terminate(GRACE_SECONDS)
        if not any(codes.values()) and None not in codes.values():
            raise RunEndedError(None)
        termination = self.workers.termination(codes, self._signals)
        # The signal kills workers that have not begun to train, and others may notice.
        stopped = {None, 0, StoppedError.exit_code, -signal.SIGTERM}
        if is_planned and not self._signals.received:
            is_secondary = termination is not None and termination.is_secondary
            return None if is_secondary or stopped.issuperset(codes.values()) else termination
        return termination

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self.workers is not None:
            self.workers.__exit__(None, None, None)
            self.records.update(self.workers.records())

    def _exit_barrier(self) -> None:
        """Not needed: workers end together, and node 0 leaves last."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's implementation looks up the machine's full name, which can be slow.
        return Event(state, source)


def _is_final(termination: Termination) -> bool:
    """Whether a restart would fail again, or the user asked to stop."""
    return (
        termination.exit_code == UsageError.exit_code
        or termination.status == "diverged"
        or (termination.status == "stopped" and not termination.is_secondary)
    )
