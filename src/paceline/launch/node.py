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
from paceline.launch.messages import MalformedError, check_fields, check_run_name, decode
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.parameter_servers import server_ranks
from paceline.launch.processes import POLL_SECONDS
from paceline.launch.record_collection import put_record, receive_files, send_files
from paceline.launch.result import RunOutcome, finish_run
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import FailureBoard, Termination, root_cause
from paceline.records import RunFolder

T = TypeVar("T")

logger = logging.getLogger("paceline")

NEWS_SECONDS = 0.5
"""How often the launchers look for one another's alarm."""
FAREWELL_SECONDS = 4.0
"""How long, after a failure, a launcher waits to hear from the others."""


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Start this node's workers, watch over them, and on the first node write the result."""
    with ExitStack() as held:
        folder = resumed
        if folder is None and config.node_rank == 0:
            folder = RunFolder.create(config)
        with SignalMonitor() as interruptions:
            try:
                nodes = NodeCoordinator(config)
                folder = _agree_on_folder(nodes, folder, held)
            except PacelineError:
                if folder is not None and resumed is None:
                    folder.discard()
                raise
            interruptions.raise_on_signal = False
            crew = NodeWorkers(
                config,
                folder,
                nodes.port,
                resumed is not None,
                quiet,
                board=nodes.board,
                servers=server_ranks(config, config.node_rank),
            )
            with _started(crew, nodes, is_new=resumed is None):
                ending = supervise(crew, nodes, interruptions)
            # The records are complete only now, with the last sample of the resources.
            ending = nodes.exchange_terminations(ending, folder, crew.records())
        reports = crew.reports()
        crew.clear_traces(reports=nodes.is_first or not nodes.shares_folder)
        return finish_run(
            config,
            folder,
            reports,
            ending,
            is_new=resumed is None,
            records=crew.files(),
            sampler_warning=crew.trouble,
            is_first=nodes.is_first,
        )


def _agree_on_folder(
    nodes: NodeCoordinator, folder: RunFolder | None, held: ExitStack
) -> RunFolder:
    """The first node locks it, for as long as `held` is open."""
    try:
        if folder is not None and nodes.is_first:
            held.enter_context(folder.locked())
        return nodes.agree_on_folder(folder)
    except PacelineError as error:
        nodes.refuse(Termination(str(error), error.exit_code))
        raise


@contextmanager
def _started(crew: NodeWorkers, nodes: NodeCoordinator, is_new: bool) -> Iterator[None]:
    """With the workers running; where they cannot be started, other nodes learn why."""
    try:
        crew.__enter__()
    except PacelineError as error:
        nodes.refuse(Termination(str(error), error.exit_code))
        if is_new:
            crew.folder.discard(crew.files())
        raise
    try:
        yield
    finally:
        crew.__exit__()


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
        """Meet the others; refuses those who were started with other settings, on all nodes."""
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
        self._looked = monotonic()
        self._lost = False
        self.board = FailureBoard(self._ask)
        self.shares_folder = True
        """Whether this node's folder is the very one of the first node."""
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
            self._part(self._others)
            raise ConfigError(problems)

    @property
    def is_first(self) -> bool:
        return self._node == 0

    def agree_on_folder(self, folder: RunFolder | None) -> RunFolder:
        """The first node's; the others make one of the same name, or see the very same one."""
        if folder is not None and self._node == 0:
            self._try_set("folder", {"id": folder.id, "identity": folder.identity()})
            return folder
        told = check_fields(self._await("folder"), "run folder", {"id": object, "identity": list})
        folder = folder or RunFolder.open_or_create(self._config, check_run_name(told["id"]))
        self.shares_folder = folder.identity() == told["identity"]
        return folder

    def refuse(self, ending: Termination) -> None:
        """Tell the others why this node takes no part."""
        self.signal_failure()
        counted = dataclasses.replace(ending, order=self.board.next_order())
        self._try_set(f"ended/{self._node}", dataclasses.asdict(counted))

    def signal_failure(self) -> None:
        """Let the others know that the run has failed, before it is known why."""
        if self._others:
            self._try_set("alarm", True)

    def failure_signaled(self) -> bool:
        """Whether another one has raised it, or the first node's launcher is gone."""
        if not self._others or monotonic() - self._looked < NEWS_SECONDS:
            return False
        self._looked = monotonic()
        return self._has("alarm") or self._lost

    def exchange_terminations(
        self, ending: Termination | None, folder: RunFolder, files: list[str]
    ) -> Termination | None:
        """Tell the others how it ended here and hear how it did there; returns the first cause.

        The first node gets the named files of the others' folders.
        """
        if not self._others:
            return ending
        if ending and ending.status != "stopped":
            self.signal_failure()
        if not self.shares_folder:
            self._hand_in(folder, files)
        self._try_set(f"ended/{self._node}", dataclasses.asdict(ending) if ending else None)
        told = self._hear_endings()
        not_collected = self._collect_or_fail(folder) if self._node == 0 else None
        self._part([node for node in self._others if node in told])
        known = root_cause([each for each in (ending, *told.values()) if each]) or not_collected
        if self._lost and (known is None or known.is_secondary):
            cause = f"lost contact with the first node at {self._config.master_addr}"
            return Termination(cause, is_loss=True)
        silent = [self._name(node) for node in self._others if node not in told]
        if silent and (known is None or known.is_secondary):
            echo = f": {known.cause}" if known else ""
            cause = f"lost contact with node {' and '.join(silent)}{echo}"
            return Termination(cause, is_loss=True)
        return known

    def _name(self, node: int) -> str:
        """Its number, with what the user calls it."""
        hosts = self._config.hosts
        return f"{node} ({hosts[node]})" if hosts else str(node)

    def _hear_endings(self) -> dict[int, Termination | None]:
        """Of those who say how they ended; after a failure they have little time for that."""
        told: dict[int, Termination | None] = {}
        begun = monotonic()
        while len(told) < len(self._others) and not self._lost:
            for node in self._others:
                if node not in told and self._has(f"ended/{node}"):
                    told[node] = self._ending(node)
            failed = self._has("alarm")
            limit = FAREWELL_SECONDS if failed else self._config.timeout_seconds
            if monotonic() - begun > limit:
                break
            sleep(POLL_SECONDS)
        return told

    def _ending(self, node: int) -> Termination | None:
        try:
            values = self._get(f"ended/{node}")
            return (
                None if values is None else Termination.of_message(values, f"ending of node {node}")
            )
        except MalformedError as error:
            return Termination(str(error), is_secondary=True)

    def _hand_in(self, folder: RunFolder, files: list[str]) -> None:
        try:
            send_files(self._store, self._node, folder.path, files)
        except RuntimeError:
            self._lost = True
        except OSError as error:
            logger.warning("records of node %d stay here: %s", self._node, error)

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

    def _part(self, others: list[int]) -> None:
        """The first node, which serves the store, lets these others go first."""
        self._try_set(f"left/{self._node}", True)
        deadline = monotonic() + FAREWELL_SECONDS
        keys = [f"left/{node}" for node in others]
        while self._node == 0 and monotonic() < deadline and not self._lost:
            if all(self._has(key) for key in keys):
                return
            sleep(POLL_SECONDS)

    def _ask(self, action: Callable[[Store], T]) -> T:
        """RunError where the store is gone."""
        try:
            if not self._lost:
                return action(self._store)
        except RuntimeError:
            self._lost = True
        raise RunError(f"lost contact with the first node at {self._config.master_addr}")

    def _get(self, key: str) -> Any:
        return decode(self._store.get(key), f"value of {key}")

    def _await(self, key: str) -> Any:
        """What another node is about to tell."""
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
