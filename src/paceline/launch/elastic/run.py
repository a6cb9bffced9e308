"""One node of an elastic run: join it, train from round to round, and finish."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator
from functools import partial
from time import monotonic, sleep
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.rendezvous import Rendezvous, port_of
from paceline.config import RunConfig
from paceline.errors import CheckpointError, ConfigError, PacelineError, RunError, StoppedError
from paceline.launch.consistency import config_mismatches
from paceline.launch.elastic.agent import ElasticAgent
from paceline.launch.elastic.rendezvous import (
    POLL_SECONDS,
    ElasticRendezvous,
    RoundLeader,
    RunEndedError,
)
from paceline.launch.elastic.store_client import LostContactError, StoreClient
from paceline.launch.environment import store_port
from paceline.launch.fork_server import ForkServer
from paceline.launch.messages import (
    MalformedError,
    check_fields,
    check_run_name,
    is_file_name,
)
from paceline.launch.node_workers import NodeWorkers
from paceline.launch.record_collection import parts_of, put_record, receive_files
from paceline.launch.result import RunOutcome, finish_run
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import FailureBoard, Termination
from paceline.records import SCHEMA, RunFolder, write_json
from paceline.training.checkpoint import iterations

FILES_SECONDS = 60.0
"""How long the records of a node may take from the store to node 0's disk."""
PART_SECONDS = 10.0
"""How long node 0 waits for the next part of another node's records."""


def run(
    config: RunConfig,
    resumed: RunFolder | None,
    quiet: bool,
    fork_server: ForkServer | None = None,
) -> RunOutcome:
    """Take part until the run ends; the first node writes the result."""
    limits = config.elastic_limits
    assert limits is not None
    rendezvous = Rendezvous(
        config.node_rank,
        limits[1],
        config.master_addr,
        store_port(config, limits[1]),
        timeout_seconds=config.rendezvous_seconds,
        noun="node",
    )
    with SignalMonitor() as signals:
        store, leads = rendezvous.join_or_serve(may_serve=config.node_rank == 0)
        port = port_of(store)
        client = StoreClient(PrefixStore("elastic", store), f"{config.master_addr}:{port}")
        with contextlib.closing(client):
            setup = _Setup(config, client, port, resumed, quiet, signals, fork_server)
            node = _FirstNode(setup) if leads else _OtherNode(setup, _await_run(setup))
            with node.joined():
                return node.conclude(node.train())


@dataclasses.dataclass(frozen=True, slots=True)
class _Setup:
    """What every node starts with."""

    config: RunConfig
    client: StoreClient
    port: int
    resumed: RunFolder | None
    quiet: bool
    signals: SignalMonitor
    fork_server: ForkServer | None = None


def _await_run(setup: _Setup) -> dict[str, Any]:
    """The description of the run from the first node, which registers before it sets that."""
    deadline = monotonic() + setup.config.rendezvous_seconds
    while monotonic() < deadline:
        description = setup.client.get("run")
        if description is not None:
            return _check_run(description, setup.config)
        sleep(POLL_SECONDS)
    endpoint = f"{setup.config.master_addr}:{setup.port}"
    raise RunError(f"{endpoint} is not an elastic run: check --master-port")


def _check_run(description: object, config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = check_fields(
        description, "run", {"id": str, "mark": str, "config": dict}
    )
    check_run_name(values["id"])
    if not is_file_name(values["mark"]):
        raise MalformedError("run", "bad value of mark")
    check_fields(values["config"], "configuration", dict.fromkeys(config.to_dict(), object))
    return values


class _Node:
    """What the first node and the others have in common."""

    folder: RunFolder

    def __init__(self, setup: _Setup) -> None:
        self._config = setup.config
        self._client = setup.client
        self._port = setup.port
        self._resumed = setup.resumed
        self._quiet = setup.quiet
        self._signals = setup.signals
        self._fork_server = setup.fork_server
        self._number = setup.client.register()
        self._rounds = ElasticRendezvous(
            setup.client, self._number, setup.config.master_addr, setup.port
        )
        self._agent = ElasticAgent(
            self._rounds, setup.config.nproc_per_node, self._make_workers, setup.signals
        )

    def train(self) -> Termination | None:
        """Train from round to round; returns why the run ended early."""
        self._signals.raise_on_signal = False
        self._rounds.check_stop = self._check_stop
        try:
            self._agent.run()
        except RunEndedError as end:
            return end.termination
        except LostContactError:
            raise
        except PacelineError as error:
            status = "stopped" if isinstance(error, StoppedError) else "failed"
            return Termination(str(error), error.exit_code, status)
        return None

    def _check_stop(self) -> None:
        if self._signals.received:
            raise StoppedError(f"stopped by {self._signals.received[0].name} between rounds")

    def _make_workers(self, rank: int, nodes: int) -> NodeWorkers:
        current = self._rounds.current
        assert current is not None
        return NodeWorkers(
            dataclasses.replace(self._config, nnodes=nodes, node_rank=rank),
            self.folder,
            self._port,
            current.iteration is not None,
            self._quiet,
            attempt=current.number,
            board=FailureBoard(self._client.ask, current.number),
            fork_server=self._fork_server,
        )


class _FirstNode(_Node):
    """Serves the store, is the leader, has the checkpoints and writes the result."""

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        self.folder = self._resumed or RunFolder.create(self._config)
        with self.folder.locked(), self._announced():
            yield

    @contextlib.contextmanager
    def _announced(self) -> Iterator[None]:
        if self._newest_checkpoint() is None and self.folder.is_finished:
            raise CheckpointError(
                f"{self.folder.path} is finished and has no checkpoint: train it again under"
                " another --name"
            )
        # A node that sees this file shares the folder.
        mark = self.folder.launch_file(secrets.token_hex(8))
        write_json(mark, {"schema": SCHEMA})
        self._leader = RoundLeader(self._config, self._client, self._newest_checkpoint, self._quiet)
        self._rounds.leader = self._leader
        config = self._config.to_dict()
        self._client.set("run", {"id": self.folder.id, "mark": mark.name, "config": config})
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    def _newest_checkpoint(self) -> int | None:
        return next(iter(iterations(self.folder.checkpoints)), None)

    def conclude(self, termination: Termination | None) -> RunOutcome:
        self._rounds.end(termination)
        self._receive_records()
        workers = self._agent.workers
        reports = workers.reports() if workers else []
        # Includes files of lost nodes.
        self.folder.remove_transient()
        is_new = self._resumed is None and self._newest_checkpoint() is None
        if termination and workers is None:
            # No worker was started.
            if is_new:
                self.folder.discard()
            raise termination.error()
        return finish_run(
            workers.config if workers else self._config,
            self.folder,
            reports,
            termination,
            is_new=is_new,
            records=workers.files() if workers else (),
            sampler_warning=workers.sampler_warning if workers else None,
            restarts=self._leader.restarts,
            worlds=self._leader.worlds,
        )

    def _receive_records(self) -> None:
        """Receive the others' records as they leave; this node serves the store and leaves last."""
        others = self._leader.live_nodes() - {self._number}
        local, limits = self._config.nproc_per_node, self._config.elastic_limits
        assert limits is not None
        # A node may have had several ranks, but never those of the first node.
        ranks, nodes = range(local, limits[1] * local), range(1, limits[1])
        names = {file.name for file in self.folder.record_files(ranks, nodes)}
        receive = partial(receive_files, put=self._put, expected=names)
        parts, since = 0, monotonic()
        while others and monotonic() - since < PART_SECONDS:
            if (received := self._client.parts_sent(others)) != parts:
                parts, since = received, monotonic()
            left = {node for node in others if self._client.get(f"left/{node}")}
            for node in left:
                self._client.ask(partial(receive, node=node), FILES_SECONDS)
            others = (others - left) & self._leader.live_nodes()
            sleep(POLL_SECONDS)

    def _put(self, name: str, contents: bytes) -> None:
        path = self.folder.path / name
        if path.suffix == ".jsonl" and path.exists():
            # Two nodes had the same rank in different rounds.
            contents = _merge_by_time(path.read_bytes(), contents)
        put_record(self.folder, name, contents)


class _OtherNode(_Node):
    def __init__(self, setup: _Setup, description: dict[str, Any]) -> None:
        super().__init__(setup)
        self._description = description

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        first = self._description["config"]
        # The number of nodes differs between nodes that joined in different rounds.
        own = {**self._config.to_dict(), "nnodes": first["nnodes"]}
        if problems := config_mismatches(own, first, "node", self._number):
            raise ConfigError(problems)
        self.folder = self._resumed or RunFolder.open_or_create(
            self._config, self._description["id"]
        )
        self._shares_folder = (self.folder.path / self._description["mark"]).exists()
        yield

    def conclude(self, termination: Termination | None) -> RunOutcome:
        if termination:
            self._rounds.end(termination)
        workers = self._agent.workers
        if workers:
            workers.remove_transient(reports=False)
            if not self._shares_folder:
                # Reports of earlier rounds, which had other ranks, no longer exist.
                names = [
                    name
                    for name in sorted(self._agent.records)
                    if (self.folder.path / name).exists()
                ]
                self._client.send_parts(parts_of(self._number, self.folder.path, names))
        self._client.set(f"left/{self._number}", True)
        if termination:
            raise termination.error()
        return RunOutcome(self.folder, None, 0)


def _merge_by_time(one: bytes, other: bytes) -> bytes:
    """The lines of two JSON-lines files, sorted by time."""

    def time_of(line: bytes) -> float:
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            return float(json.loads(line).get("time", 0.0))
        return 0.0

    lines = [line for line in (*one.splitlines(), *other.splitlines()) if line]
    return b"".join(line + b"\n" for line in sorted(lines, key=time_of))
