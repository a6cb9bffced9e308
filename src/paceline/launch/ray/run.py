"""A run on a Ray cluster, restarted after losses.

Ray provides machines and slots and detects losses; a run on them is a run on any machines
(launch/remote/run.py). When a worker, an actor or a machine is lost, all workers restart from the
newest checkpoint, on the machines that are available then.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.config import RunConfig
from paceline.errors import ConfigError, PacelineError, RunError, StoppedError, UsageError
from paceline.launch.ray.cluster import Connection, HeadLostError, HeadMonitor, LostError, connected
from paceline.launch.ray.machines import (
    RayMachines,
    ResourceRequest,
    TooFewError,
    has_gpus,
    ray_machines,
)
from paceline.launch.remote.run import run_on
from paceline.launch.result import RunOutcome
from paceline.launch.signals import SignalMonitor
from paceline.records import RunFolder
from paceline.training.checkpoint import iterations


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Train on a Ray cluster; the records are here at the end."""
    with _cluster(config, quiet) as (connection, signals):
        outcome = RestartLoop(config, connection.head, quiet, signals).run(resumed)
        connection.exit_code = outcome.exit_code
        return outcome


@contextlib.contextmanager
def machines_for(config: RunConfig, quiet: bool) -> Iterator[tuple[RayMachines, SignalMonitor]]:
    """Reserve the machines that a configuration needs, for any command, and monitor signals."""
    with _cluster(config, quiet) as (connection, signals):
        timeout, say = config.rendezvous_seconds, _ignore if quiet else _print
        with ray_machines(resources_for(config), connection.head, timeout, say) as machines:
            yield machines, signals


@contextlib.contextmanager
def _cluster(config: RunConfig, quiet: bool) -> Iterator[tuple[Connection, SignalMonitor]]:
    """Connect to Ray; signals are monitored after that, because Ray installs handlers."""
    _check(config)
    say = _ignore if quiet else _print
    with connected(config.nproc_per_node, say) as connection, SignalMonitor() as signals:
        yield connection, signals


def _check(config: RunConfig) -> None:
    conflicting = {
        "--hosts": config.hosts,
        "--cluster": config.cluster,
        "--elastic": config.elastic,
    }
    problems = [
        f"{flag}: cannot be combined with --launcher ray, which chooses its machines"
        for flag, value in conflicting.items()
        if value
    ]
    if problems:
        raise ConfigError(problems)


def resources_for(config: RunConfig) -> ResourceRequest:
    """The machines and slots of a run; GPUs if it uses them and the cluster has them."""
    each = config.nproc_per_node
    is_on_gpus = config.device == "cuda" or (
        config.device == "auto" and has_gpus(config.nnodes, each)
    )
    return ResourceRequest(config.nnodes, each, each if is_on_gpus else 0)


def _print(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


def _ignore(text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an attempt ended."""

    outcome: RunOutcome | None
    """None if no worker began to train."""
    error: PacelineError | None
    is_loss: bool
    """Whether a worker or a machine was lost, so that a restart may succeed."""

    @property
    def cause(self) -> str:
        if self.outcome and self.outcome.result:
            return str(self.outcome.result["cause"])
        return str(self.error)


@dataclass(slots=True)
class RestartLoop:
    config: RunConfig
    head: HeadMonitor
    quiet: bool
    signals: SignalMonitor
    last: RunOutcome | None = None
    """Outcome of the last attempt that trained."""
    first: str | None = None
    """Ray's id of the machine that has the run folder."""
    aside: list[tuple[Path, str]] = field(default_factory=list)
    """Folders of attempts without a checkpoint, and their new names."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Cause, resumed iteration and seconds since the first attempt of each restart."""

    def run(self, resumed: RunFolder | None) -> RunOutcome:
        began = monotonic()
        ended = self._attempt(resumed)
        while ended.is_loss:
            if not self.head.answers():
                return self._give_up(self._headless(ended))
            if len(self.restarts) >= self.config.max_restarts:
                return self._give_up(f"{ended.cause}{self._used_up()}")
            resumed = self._folder_to_resume(ended, resumed)
            iteration = iterations(resumed.checkpoints)[0] if resumed else 0
            seconds = monotonic() - began
            self.restarts.append({"cause": ended.cause, "iteration": iteration, "seconds": seconds})
            self._report_restart(ended.cause, iteration)
            try:
                ended = self._attempt(resumed)
            except TooFewError as error:
                return self._give_up(f"{ended.cause}; a restart {error.situation}")
        if ended.outcome is None:
            raise ended.error or RunError("the run ended without an error message")
        return self._with_restarts(ended.outcome)

    def _attempt(self, resumed: RunFolder | None) -> _Ended:
        config, say = self.config, _ignore if self.quiet else _print
        self.signals.raise_on_signal = True
        timeout = config.rendezvous_seconds
        try:
            with ray_machines(
                resources_for(config), self.head, timeout, say, self.first
            ) as machines:
                self.first = machines.first_node_id
                return self._run_on(machines, resumed)
        except LostError as error:
            return _Ended(None, error, is_loss=True)

    def _run_on(self, machines: RayMachines, resumed: RunFolder | None) -> _Ended:
        for path, name in self.aside:
            machines.set_aside(path, name)
        config = replace(self.config, master_port=machines.free_port())
        outcome, error = None, None
        try:
            outcome = run_on(machines, config, resumed, self.quiet, self.signals)
        except PacelineError as raised:
            error = raised
        self.last = outcome or self.last
        return _Ended(outcome, error, self._is_loss(machines, outcome, error))

    def _is_loss(
        self, machines: RayMachines, outcome: RunOutcome | None, error: PacelineError | None
    ) -> bool:
        if self.signals.received or isinstance(error, UsageError):
            return False
        result = outcome.result if outcome else None
        if result and result["status"] == "finished":
            return False
        if self.head.is_lost:
            # Then this process stopped the run.
            return True
        if isinstance(error, StoppedError):
            return False
        return bool(machines.lost or (result and result.get("is_loss")))

    def _folder_to_resume(self, ended: _Ended, resumed: RunFolder | None) -> RunFolder | None:
        """The folder to resume; without a checkpoint, it is renamed and the run starts over."""
        if ended.outcome is None:
            return resumed
        folder = ended.outcome.folder
        if iterations(folder.checkpoints):
            return folder
        self.config = replace(self.config, out=str(folder.path.parent), name=folder.id)
        name = f"{folder.id}~lost-{len(self.restarts) + 1}"
        folder.path.rename(folder.path.with_name(name))
        self.aside.append((folder.path, name))
        return None

    def _report_restart(self, cause: str, iteration: int) -> None:
        count, most = len(self.restarts), self.config.max_restarts
        begin = f"after iteration {iteration}"
        if not iteration:
            begin = "from the beginning"
            if self.config.checkpoint_every == "never":
                begin += ", because --checkpoint-every is not set"
        if not self.quiet:
            _print(f"{cause}: restart {count} of {most} {begin}")

    def _headless(self, ended: _Ended) -> str:
        if isinstance(ended.error, HeadLostError):
            return str(ended.error)
        result = ended.outcome.result if ended.outcome else None
        if result and result["status"] == "stopped":
            situation = f"stopped after iteration {result['iterations']}"
        else:
            situation = ended.cause
        return str(HeadLostError(self.head, situation))

    def _used_up(self) -> str:
        most = self.config.max_restarts
        return f" (--max-restarts {most} are used up)" if most else ""

    def _give_up(self, cause: str) -> RunOutcome:
        if self.last is None or self.last.result is None:
            raise RunError(cause)
        folder = self.last.folder
        if not folder.path.is_dir():
            # It was renamed for an attempt that did not start.
            path, name = self.aside.pop()
            path.with_name(name).rename(path)
        result = {**self.last.result, "status": "failed", "cause": cause}
        return self._with_restarts(RunOutcome(folder, result, RunError.exit_code))

    def _with_restarts(self, outcome: RunOutcome) -> RunOutcome:
        """The outcome with the restarts in its result."""
        if outcome.result is None:
            return outcome
        result = outcome.result | ({"restarts": self.restarts} if self.restarts else {})
        outcome.folder.write_result(result)
        return outcome._replace(result=result)
