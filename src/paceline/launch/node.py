"""The launcher of one node, and its coordination with the launchers of the other nodes.

The launcher of each node starts the node's workers (launch/node_workers.py), supervises them and
ends all of them when one fails. The launchers share a store that node 0 serves. There they compare
their configurations before any worker starts, signal a failure, and exchange what they know of its
cause, so that all of them report the root cause and not its consequences.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep, time
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.rendezvous import Rendezvous, port_of
from paceline.config import RunConfig
from paceline.errors import ConfigError, PacelineError, RunError
from paceline.launch.consistency import config_mismatches
from paceline.launch.environment import store_port
from paceline.launch.fork_server import ForkServer
from paceline.launch.messages import MalformedError, check_fields, check_run_name, decode
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.parameter_servers import server_ranks
from paceline.launch.processes import POLL_SECONDS
from paceline.launch.record_collection import put_record, receive_files, send_files
from paceline.launch.result import RunOutcome, finish_run
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import FailureBoard, Termination, root_cause
from paceline.records import RunFolder
from paceline.strategies import create_strategy

T = TypeVar("T")

logger = logging.getLogger("paceline")

FAILURE_POLL_SECONDS = 0.5
"""How often a launcher checks whether another one has signaled a failure."""
EXCHANGE_SECONDS = 4.0
"""How long a launcher waits, after a failure, for the terminations of the others."""


def run(
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    fork_server: ForkServer | None = None,
) -> RunOutcome:
    """Start and supervise this node's workers; node 0 writes the result."""
    with ExitStack() as stack:
        folder = resumed
        if folder is None and config.node_rank == 0:
            folder = RunFolder.create(config)
        with SignalMonitor() as signals:
            try:
                nodes = NodeCoordinator(config)
                folder = _agree_on_folder(nodes, folder, stack)
            except PacelineError:
                if folder is not None and resumed is None:
                    folder.discard()
                raise
            signals.raise_on_signal = False
            strategy = create_strategy(config.strategy, config.options)
            workers = NodeWorkers(
                config,
                folder,
                nodes.port,
                resumed is not None,
                quiet,
                board=nodes.board,
                servers=server_ranks(config, strategy, config.node_rank),
                fork_server=fork_server,
            )
            with _started(workers, nodes, is_new=resumed is None):
                if fork_server is not None:
                    # All workers have started, and the resources of the node are sampled.
                    fork_server.close()
                termination = supervise(workers, nodes, signals)
            # Only now are the records complete: they include the last sample of the resources.
            termination = nodes.exchange_terminations(termination, folder, workers.records())
        reports = workers.reports()
        workers.remove_transient(reports=nodes.is_first or not nodes.shares_folder)
        return finish_run(
            config,
            folder,
            reports,
            termination,
            is_new=resumed is None,
            records=workers.files(),
            sampler_warning=workers.sampler_warning,
            is_first=nodes.is_first,
        )


def _agree_on_folder(
    nodes: NodeCoordinator, folder: RunFolder | None, stack: ExitStack
) -> RunFolder:
    """Node 0 locks the folder, until `stack` closes."""
    try:
        if folder is not None and nodes.is_first:
            stack.enter_context(folder.locked())
        return nodes.agree_on_folder(folder)
    except PacelineError as error:
        nodes.reject(Termination(str(error), error.exit_code))
        raise


@contextmanager
def _started(workers: NodeWorkers, nodes: NodeCoordinator, is_new: bool) -> Iterator[None]:
    """Run the workers for the duration of the block; if they cannot start, tell the other nodes."""
    try:
        workers.__enter__()
    except PacelineError as error:
        nodes.reject(Termination(str(error), error.exit_code))
        if is_new:
            workers.folder.discard(workers.files())
        raise
    try:
        yield
    finally:
        workers.__exit__()


def supervise(
    workers: NodeWorkers, nodes: NodeCoordinator, signals: SignalMonitor
) -> Termination | None:
    """Wait until all workers of this node have ended, or end them after a failure on any node.

    Returns what this node knows of the cause. The first Ctrl-C lets the workers agree on a last
    iteration; the second kills them.
    """
    is_forwarded = False
    while True:
        codes = workers.codes()
        if all(code is not None for code in codes.values()):
            return workers.termination(codes, signals)
        has_failed = workers.has_failed(codes)
        if has_failed:
            nodes.signal_failure()
        if has_failed or nodes.failure_signaled():
            return workers.termination(workers.terminate(), signals)
        if signals.received and not is_forwarded:
            is_forwarded = True
            workers.signal(signals.received[0])
        if len(signals.received) > 1:
            return workers.termination(workers.terminate(0.0), signals)
        sleep(POLL_SECONDS)


class NodeCoordinator:
    def __init__(self, config: RunConfig) -> None:
        """Join the other nodes; ConfigError on all of them if their configurations differ."""
        self._config = config
        self._node = config.node_rank
        self._others = [node for node in range(config.nnodes) if node != self._node]
        self._store = Rendezvous(
            self._node,
            config.nnodes,
            config.master_addr,
            store_port(config, config.nnodes),
            timeout_seconds=config.rendezvous_seconds,
            name="nodes",
            noun="node",
        ).join()
        self.port = store_port(config, config.nnodes) or port_of(self._store)
        self._checked_at = monotonic()
        self._lost = False
        self.board = FailureBoard(self._ask)
        self.shares_folder = True
        """Whether this node and node 0 share the run folder."""
        self._compare_configs()

    def _compare_configs(self) -> None:
        self._try_set(f"config/{self._node}", self._config.to_dict())
        kinds = dict.fromkeys(self._config.to_dict(), object)
        settings = [
            check_fields(self._await(f"config/{node}"), f"configuration of node {node}", kinds)
            for node in range(self._config.nnodes)
        ]
        problems = [
            problem
            for node in range(1, self._config.nnodes)
            for problem in config_mismatches(settings[node], settings[0], "node", node)
        ]
        if problems:
            self._leave(self._others)
            raise ConfigError(problems)

    @property
    def is_first(self) -> bool:
        return self._node == 0

    def agree_on_folder(self, folder: RunFolder | None) -> RunFolder:
        """Node 0's folder; the others use the same one if they see it, or make one of its name."""
        if folder is not None and self._node == 0:
            self._try_set("folder", {"id": folder.id, "identity": folder.identity()})
            return folder
        first = check_fields(self._await("folder"), "run folder", {"id": object, "identity": list})
        folder = folder or RunFolder.open_or_create(self._config, check_run_name(first["id"]))
        self.shares_folder = folder.identity() == first["identity"]
        return folder

    def reject(self, termination: Termination) -> None:
        """Report to the other nodes why this node does not take part."""
        self.signal_failure()
        counted = dataclasses.replace(termination, order=self.board.next_order())
        self._try_set(f"ended/{self._node}", dataclasses.asdict(counted))

    def signal_failure(self) -> None:
        """Tell the other nodes that the run has failed, before the cause is known."""
        if self._others:
            self._try_set("alarm", True)

    def failure_signaled(self) -> bool:
        """Whether another node has signaled a failure, or node 0's launcher is gone."""
        if not self._others or monotonic() - self._checked_at < FAILURE_POLL_SECONDS:
            return False
        self._checked_at = monotonic()
        return self._has("alarm") or self._lost

    def exchange_terminations(
        self, termination: Termination | None, folder: RunFolder, files: list[str]
    ) -> Termination | None:
        """Exchange with the other nodes how the run ended; returns the root cause.

        Node 0 receives `files` of the other nodes' folders.
        """
        if not self._others:
            return termination
        if termination and termination.status != "stopped":
            self.signal_failure()
        if not self.shares_folder:
            self._send_records(folder, files)
        own = dataclasses.asdict(termination) if termination else None
        self._try_set(f"ended/{self._node}", own)
        received = self._receive_terminations()
        not_collected = self._collect_or_fail(folder) if self._node == 0 else None
        self._leave([node for node in self._others if node in received])
        terminations = [each for each in (termination, *received.values()) if each]
        known = root_cause(terminations) or not_collected
        if self._lost and (known is None or known.is_secondary):
            cause = f"lost contact with the first node at {self._config.master_addr}"
            return Termination(cause, is_loss=True)
        silent = [self._name(node) for node in self._others if node not in received]
        if silent and (known is None or known.is_secondary):
            consequence = f": {known.cause}" if known else ""
            cause = f"lost contact with node {' and '.join(silent)}{consequence}"
            return Termination(cause, is_loss=True)
        return known

    def _name(self, node: int) -> str:
        """The node's number, with the user's name for it."""
        hosts = self._config.hosts
        return f"{node} ({hosts[node]})" if hosts else str(node)

    def _receive_terminations(self) -> dict[int, Termination | None]:
        """How the other nodes ended; after a failure, of those that report it soon."""
        received: dict[int, Termination | None] = {}
        began = monotonic()
        while len(received) < len(self._others) and not self._lost:
            for node in self._others:
                if node not in received and self._has(f"ended/{node}"):
                    received[node] = self._termination(node)
            has_failed = self._has("alarm")
            limit = EXCHANGE_SECONDS if has_failed else self._config.timeout_seconds
            if monotonic() - began > limit:
                break
            sleep(POLL_SECONDS)
        return received

    def _termination(self, node: int) -> Termination | None:
        try:
            values = self._get(f"ended/{node}")
            if values is None:
                return None
            return Termination.of_message(values, f"termination of node {node}")
        except MalformedError as error:
            return Termination(str(error), is_secondary=True)

    def _send_records(self, folder: RunFolder, files: list[str]) -> None:
        try:
            send_files(self._store, self._node, folder.path, files)
        except RuntimeError:
            self._lost = True
        except OSError as error:
            logger.warning("records of node %d were not sent to node 0: %s", self._node, error)

    def _collect_or_fail(self, folder: RunFolder) -> Termination | None:
        try:
            self._collect(folder)
        except RunError as error:
            return Termination(str(error), ended=time())
        return None

    def _collect(self, folder: RunFolder) -> None:
        local = self._config.nproc_per_node
        for node in self._others:
            ranks = range(node * local, (node + 1) * local)
            receive_files(
                self._store,
                node,
                lambda name, contents: put_record(folder, name, contents),
                expected={file.name for file in folder.record_files(ranks, [node])},
            )

    def _leave(self, others: list[int]) -> None:
        """Leave; node 0, which serves the store, waits until these others have left."""
        self._try_set(f"left/{self._node}", True)
        deadline = monotonic() + EXCHANGE_SECONDS
        keys = [f"left/{node}" for node in others]
        while self._node == 0 and monotonic() < deadline and not self._lost:
            if all(self._has(key) for key in keys):
                return
            sleep(POLL_SECONDS)

    def _ask(self, action: Callable[[Store], T]) -> T:
        """Run an action with the store; RunError if the store is gone."""
        try:
            if not self._lost:
                return action(self._store)
        except RuntimeError:
            self._lost = True
        raise RunError(f"lost contact with the first node at {self._config.master_addr}")

    def _get(self, key: str) -> Any:
        return decode(self._store.get(key), f"value of {key}")

    def _await(self, key: str) -> Any:
        """The value of a key that another node sets soon."""
        deadline = monotonic() + self._config.rendezvous_seconds
        while not self._has(key):
            if self._lost or self._has("alarm") or monotonic() > deadline:
                raise RunError(f"node {self._node}: another node left before training began")
            sleep(POLL_SECONDS)
        return self._get(key)

    def _try_set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError:
            self._lost = True

    def _has(self, key: str) -> bool:
        try:
            return not self._lost and bool(self._store.check([key]))
        except RuntimeError:
            self._lost = True
            return False
