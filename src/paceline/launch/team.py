"""Several workers on this machine, and perhaps others on more machines, each started by its own.

The launcher of each node starts the node's workers and watches over them. The launchers meet at a
store that the first node's launcher serves, and there they tell one another of the first failure:
it, and not the echoes that its peers see of it, is what the user is told everywhere.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

from paceline.comm.place import Place
from paceline.comm.rendezvous import Meeting
from paceline.config import RunConfig
from paceline.errors import PacelineError, RunError, UsageError
from paceline.launch.outcome import Outcome
from paceline.launch.result import first_cause, write_result
from paceline.measure.sampler import ResourceSampler
from paceline.records import SCHEMA, RunFolder, read_json, write_json
from paceline.worker.report import WorkerReport

POLL_SECONDS = 0.05
NEWS_SECONDS = 0.5
"""How often the launchers look for one another's failures."""
GRACE_SECONDS = 3.0
"""What the others get, after a first failure, to notice it themselves and write down their part."""
FAREWELL_SECONDS = 10.0
"""How long the first node's launcher serves on, for the others to come to their end."""


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> Outcome:
    """Start this node's workers, watch over them, and on the first node write the result."""
    folder = resumed
    if folder is None and config.node_rank == 0:
        folder = RunFolder.create(config)
    try:
        nodes = Nodes(config, folder)
    except PacelineError:
        if folder is not None and resumed is None:
            folder.discard()
        raise
    with _Crew(config, nodes, resumed is not None, quiet) as crew:
        failure = crew.watch()
        nodes.leave(failure)
    return crew.conclude(failure)


class Nodes:
    """What the launchers of all nodes tell one another."""

    def __init__(self, config: RunConfig, folder: RunFolder | None) -> None:
        self._config = config
        self._store = Meeting(
            config.node_rank,
            config.nnodes,
            config.master_addr,
            config.master_port,
            timeout_seconds=config.rendezvous_seconds,
            name="nodes",
            noun="node",
        ).join()
        if folder is not None and config.node_rank == 0:
            self._store.set("folder", folder.id)
        name = self._store.get("folder").decode()
        self.folder = folder or RunFolder.beside(config, name)
        self._looked = monotonic()

    def tell(self, cause: str) -> None:
        """The first failure counts; later ones are left out."""
        if self._config.nnodes > 1:
            self._store.compare_set("failure", "", cause)

    def news(self) -> str | None:
        """The first failure that any node has told of."""
        if self._config.nnodes == 1 or monotonic() - self._looked < NEWS_SECONDS:
            return None
        self._looked = monotonic()
        try:
            if self._store.check(["failure"]):
                return self._store.get("failure").decode()
        except RuntimeError:
            return f"lost contact with the first node at {self._config.master_addr}"
        return None

    def leave(self, failure: str | None) -> None:
        """Tell the others how it ended here; the first node's launcher lets them go first."""
        if self._config.nnodes == 1:
            return
        try:
            if failure:
                self.tell(failure)
            self._store.set(f"left/{self._config.node_rank}", "")
            deadline = monotonic() + FAREWELL_SECONDS
            keys = [f"left/{node}" for node in range(self._config.nnodes)]
            while self._config.node_rank == 0 and monotonic() < deadline:
                if self._store.check(keys):
                    return
                sleep(POLL_SECONDS)
        except RuntimeError:
            return


class _Crew:
    """The worker processes of this node."""

    def __init__(self, config: RunConfig, nodes: Nodes, resumed: bool, quiet: bool) -> None:
        self.config = config
        self.folder = nodes.folder
        self._nodes = nodes
        self._arguments = ["resumed" if resumed else "new", "quiet" if quiet else "shown"]
        self._resumed = resumed
        self._launch_file = self.folder.path / f"launch-{config.node_rank}.json"
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._signals = 0
        self._sampler = ResourceSampler(
            self.folder.resources_file(config.node_rank),
            [os.getpid()],
            node=config.node_rank,
            interval_seconds=config.sample_seconds,
        )

    @property
    def ranks(self) -> range:
        first = self.config.node_rank * self.config.nproc_per_node
        return range(first, first + self.config.nproc_per_node)

    def __enter__(self) -> _Crew:
        for rank in self.ranks:
            self.folder.report_file(rank).unlink(missing_ok=True)
            self._failure_file(rank).unlink(missing_ok=True)
        write_json(self._launch_file, {"schema": SCHEMA, "config": self.config.to_dict()})
        for rank in self.ranks:
            self._processes[rank] = self._start(rank)
        self._sampler.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self._trouble = self._sampler.stop()
        self._launch_file.unlink(missing_ok=True)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        config = self.config
        place = Place(
            rank=rank,
            world_size=config.workers,
            local_rank=rank - self.ranks.start,
            local_world_size=config.nproc_per_node,
            node=config.node_rank,
            nnodes=config.nnodes,
            master_addr=config.master_addr,
            master_port=config.master_port,
            store_is_served=True,
        )
        sources = str(Path(__file__).parents[2])
        inherited = os.environ.get("PYTHONPATH", "")
        command = [sys.executable, "-m", "paceline.launch.member", str(self._launch_file)]
        return subprocess.Popen(
            [*command, str(self.folder.path), *self._arguments],
            env={
                **os.environ,
                **place.to_environment(),
                "PYTHONPATH": os.pathsep.join(filter(None, (sources, inherited))),
            },
            # Ctrl-C reaches the whole foreground group; the launcher decides what becomes of it.
            start_new_session=True,
        )

    def watch(self) -> str | None:
        """Until all workers have ended; returns the first cause where one of them failed."""
        with self._forwarding_signals():
            while True:
                codes = {rank: process.poll() for rank, process in self._processes.items()}
                if any(codes.values()):
                    return self._first_failure()
                if all(code == 0 for code in codes.values()):
                    return None
                if news := self._nodes.news():
                    self._end_all()
                    return news
                sleep(POLL_SECONDS)

    def _first_failure(self) -> str:
        """Give the others time to write down their part; then end them, and find the cause."""
        deadline = monotonic() + GRACE_SECONDS
        while monotonic() < deadline and any(p.poll() is None for p in self._processes.values()):
            sleep(POLL_SECONDS)
        killed_before = {rank: p.poll() for rank, p in self._processes.items()}
        self._end_all()
        for rank in self.ranks:
            if self._failure_file(rank).exists():
                failure = read_json(self._failure_file(rank))
                error = UsageError if failure["exit_code"] == UsageError.exit_code else RunError
                raise error(failure["cause"])
        reports = self.reports()
        known = first_cause([report for report in reports if report.status != "finished"])
        if known is None or known.is_echo:
            for rank, code in killed_before.items():
                if code is not None and code < 0:
                    return f"rank {rank} was killed by {signal.Signals(-code).name}"
        if known is None:
            rank, code = next((rank, code) for rank, code in killed_before.items() if code)
            return f"rank {rank} ended with exit code {code} and said nothing"
        return known.cause or "a worker failed"

    def _end_all(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def reports(self) -> list[WorkerReport]:
        """All that are there: this node's, and on the first node those handed in by the others."""
        files = (self.folder.report_file(rank) for rank in range(self.config.workers))
        values = [read_json(file) for file in files if file.exists()]
        for value in values:
            del value["schema"]
        return [WorkerReport(**value) for value in values]

    def conclude(self, failure: str | None) -> Outcome:
        reports = self.reports()
        if self._trouble and reports:
            reports[0].warnings.append(self._trouble)
        code = max((report.exit_code for report in reports), default=1)
        if self.config.node_rank:
            if failure:
                raise RunError(failure)
            return Outcome(self.folder, None, code)
        told = first_cause(reports)
        cause = failure if told is None or told.cause != failure else None
        result = write_result(self.config, self.folder, reports, cause)
        for rank in range(self.config.workers):
            self.folder.report_file(rank).unlink(missing_ok=True)
        return Outcome(self.folder, result, code or (1 if failure else 0))

    def _failure_file(self, rank: int) -> Path:
        return self.folder.path / f"failure-{rank}.json"

    @contextmanager
    def _forwarding_signals(self) -> Iterator[None]:
        """The first Ctrl-C lets the workers agree on a last iteration; the second ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def forward(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            for process in self._processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM if self._signals == 1 else signal.SIGKILL)

        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, forward) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)
