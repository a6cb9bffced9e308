"""One node's part in an elastic run, from the command given there to its result."""

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
"""What the records of a node may take on their way from the store to the first one's disk."""
FAREWELL_SECONDS = 10.0
"""How long the first node waits for the next part of what the others hand in."""


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Take part until the run has ended; on the first node, write the result."""
    limits = config.elastic_limits
    assert limits is not None
    meeting = Rendezvous(
        config.node_rank,
        limits[1],
        config.master_addr,
        store_port(config, limits[1]),
        timeout_seconds=config.rendezvous_seconds,
        noun="node",
    )
    with SignalMonitor() as interruptions:
        store, leads = meeting.join_or_host(may_serve=config.node_rank == 0)
        port = port_of(store)
        contact = StoreClient(PrefixStore("elastic", store), f"{config.master_addr}:{port}")
        with contextlib.closing(contact):
            given = _Given(config, contact, port, resumed, quiet, interruptions)
            node = _FirstNode(given) if leads else _OtherNode(given, _await_run(given))
            with node.joined():
                return node.conclude(node.train())


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """What a node begins with."""

    config: RunConfig
    contact: StoreClient
    port: int
    resumed: RunFolder | None
    quiet: bool
    interruptions: SignalMonitor


def _await_run(given: _Given) -> dict[str, Any]:
    """What the first node tells about the run; it enlists before, and so has the first number."""
    deadline = monotonic() + given.config.rendezvous_seconds
    while monotonic() < deadline:
        told = given.contact.get("run")
        if told is not None:
            return _check_run(told, given.config)
        sleep(POLL_SECONDS)
    place = f"{given.config.master_addr}:{given.port}"
    raise RunError(f"what listens at {place} is no elastic run: check --master-port")


def _check_run(told: object, config: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = check_fields(told, "run", {"id": str, "mark": str, "config": dict})
    check_run_name(values["id"])
    if not is_file_name(values["mark"]):
        raise MalformedError("run", "bad value of mark")
    check_fields(values["config"], "configuration", dict.fromkeys(config.to_dict(), object))
    return values


class _Node:
    """What all nodes do alike."""

    folder: RunFolder

    def __init__(self, given: _Given) -> None:
        self._config = given.config
        self._contact = given.contact
        self._port = given.port
        self._resumed = given.resumed
        self._quiet = given.quiet
        self._interruptions = given.interruptions
        self._number = given.contact.register()
        self._rounds = ElasticRendezvous(
            given.contact, self._number, given.config.master_addr, given.port
        )
        self._agent = ElasticAgent(
            self._rounds, given.config.nproc_per_node, self._make_crew, given.interruptions
        )

    def train(self) -> Termination | None:
        """Go from round to round; why the run ended before it was done."""
        self._interruptions.raise_on_signal = False
        self._rounds.check_stop = self._check_stop
        try:
            self._agent.run()
        except RunEndedError as over:
            return over.ending
        except LostContactError:
            raise
        except PacelineError as error:
            status = "stopped" if isinstance(error, StoppedError) else "failed"
            return Termination(str(error), error.exit_code, status)
        return None

    def _check_stop(self) -> None:
        if self._interruptions.received:
            raise StoppedError(f"stopped by {self._interruptions.received[0].name} between rounds")

    def _make_crew(self, rank: int, nodes: int) -> NodeWorkers:
        current = self._rounds.current
        assert current is not None
        return NodeWorkers(
            dataclasses.replace(self._config, nnodes=nodes, node_rank=rank),
            self.folder,
            self._port,
            current.iteration is not None,
            self._quiet,
            attempt=current.number,
            board=FailureBoard(self._contact.ask, current.number),
        )


class _FirstNode(_Node):
    """Serves the store, leads, has the checkpoints, and writes the result."""

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
        # Whoever sees this file has the very same folder.
        mark = self.folder.launch_file(secrets.token_hex(8))
        write_json(mark, {"schema": SCHEMA})
        self._leader = RoundLeader(
            self._config, self._contact, self._newest_checkpoint, self._quiet
        )
        self._rounds.leader = self._leader
        config = self._config.to_dict()
        self._contact.set("run", {"id": self.folder.id, "mark": mark.name, "config": config})
        try:
            yield
        finally:
            mark.unlink(missing_ok=True)

    def _newest_checkpoint(self) -> int | None:
        return next(iter(iterations(self.folder.checkpoints)), None)

    def conclude(self, ending: Termination | None) -> RunOutcome:
        self._rounds.end(ending)
        self._gather_records()
        crew = self._agent.crew
        reports = crew.reports() if crew else []
        # Of lost nodes as well.
        self.folder.remove_transient()
        is_new = self._resumed is None and self._newest_checkpoint() is None
        if ending and crew is None:
            # No worker was started.
            if is_new:
                self.folder.discard()
            raise ending.error()
        return finish_run(
            crew.config if crew else self._config,
            self.folder,
            reports,
            ending,
            is_new=is_new,
            records=crew.files() if crew else (),
            sampler_warning=crew.trouble if crew else None,
            restarts=self._leader.restarts,
            worlds=self._leader.worlds,
        )

    def _gather_records(self) -> None:
        """Of the others, as they leave; this node, which serves the store, goes last."""
        others = self._leader.living() - {self._number}
        local, limits = self._config.nproc_per_node, self._config.elastic_limits
        assert limits is not None
        # A node may have had several ranks, but never those of the first one.
        ranks, nodes = range(local, limits[1] * local), range(1, limits[1])
        names = {file.name for file in self.folder.record_files(ranks, nodes)}
        receive = partial(receive_files, put=self._put, expected=names)
        parts, since = 0, monotonic()
        while others and monotonic() - since < FAREWELL_SECONDS:
            if (come := self._contact.parts_handed_in(others)) != parts:
                parts, since = come, monotonic()
            left = {node for node in others if self._contact.get(f"left/{node}")}
            for node in left:
                self._contact.ask(partial(receive, node=node), FILES_SECONDS)
            others = (others - left) & self._leader.living()
            sleep(POLL_SECONDS)

    def _put(self, name: str, contents: bytes) -> None:
        path = self.folder.path / name
        if path.suffix == ".jsonl" and path.exists():
            # Two nodes have had the same rank, one after the other.
            contents = _merged(path.read_bytes(), contents)
        put_record(self.folder, name, contents)


class _OtherNode(_Node):
    def __init__(self, given: _Given, told: dict[str, Any]) -> None:
        super().__init__(given)
        self._told = told

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        told = self._told
        first = told["config"]
        # What each of them knows about earlier rounds does not matter.
        own = {**self._config.to_dict(), "nnodes": first["nnodes"]}
        if problems := config_mismatches(own, first, "node", self._number):
            raise ConfigError(problems)
        self.folder = self._resumed or RunFolder.open_or_create(self._config, told["id"])
        self._shares_folder = (self.folder.path / told["mark"]).exists()
        yield

    def conclude(self, ending: Termination | None) -> RunOutcome:
        if ending:
            self._rounds.end(ending)
        crew = self._agent.crew
        if crew:
            crew.clear_traces(reports=False)
            if not self._shares_folder:
                # The reports of earlier rounds, in which ranks were others, are gone.
                names = [
                    name
                    for name in sorted(self._agent.records)
                    if (self.folder.path / name).exists()
                ]
                self._contact.hand_in(parts_of(self._number, self.folder.path, names))
        self._contact.set(f"left/{self._number}", True)
        if ending:
            raise ending.error()
        return RunOutcome(self.folder, None, 0)


def _merged(one: bytes, other: bytes) -> bytes:
    """The lines of two JSON-lines files, in the order of their times."""

    def moment(line: bytes) -> float:
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            return float(json.loads(line).get("time", 0.0))
        return 0.0

    lines = [line for line in (*one.splitlines(), *other.splitlines()) if line]
    return b"".join(line + b"\n" for line in sorted(lines, key=moment))
