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
        patience, say = config.rendezvous_seconds, _say_nothing if quiet else _say
        with ray_machines(resources_for(config), connection.head, patience, say) as machines:
            yield machines, signals


@contextlib.contextmanager
def _cluster(config: RunConfig, quiet: bool) -> Iterator[tuple[Connection, SignalMonitor]]:
    """Ray takes signals for itself when it connects, so they are noted after that."""
    _check(config)
    say = _say_nothing if quiet else _say
    with connected(config.nproc_per_node, say) as connection, SignalMonitor() as signals:
        yield connection, signals


def _check(config: RunConfig) -> None:
    given = {"--hosts": config.hosts, "--cluster": config.cluster, "--elastic": config.elastic}
    problems = [
        f"{flag}: not with --launcher ray, which finds its machines itself: leave one of them out"
        for flag, value in given.items()
        if value
    ]
    if problems:
        raise ConfigError(problems)


def resources_for(config: RunConfig) -> ResourceRequest:
    """The machines and slots of a run; GPUs where it is to use them and the cluster has them."""
    each = config.nproc_per_node
    is_on_gpus = config.device == "cuda" or (
        config.device == "auto" and has_gpus(config.nnodes, each)
    )
    return ResourceRequest(config.nnodes, each, each if is_on_gpus else 0)


def _say(text: str) -> None:
    sys.stderr.write(f"paceline: {text}\n")
    sys.stderr.flush()


def _say_nothing(text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an attempt ended."""

    outcome: RunOutcome | None
    """None where nobody had begun to train."""
    error: PacelineError | None
    is_loss: bool
    """Whether a worker or a machine went away, so that another attempt is worth while."""

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
    """Of the last attempt that came so far."""
    first: str | None = None
    """The machine that has the run's folder, by Ray's name for it."""
    aside: list[tuple[Path, str]] = field(default_factory=list)
    """Folders of attempts that nobody can go on from, and what they are called from then on."""
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """For each its cause, the iteration that it went on from, and when it was, by the wall clock
    since the first attempt."""

    def run(self, resumed: RunFolder | None) -> RunOutcome:
        begun = monotonic()
        ended = self._attempt(resumed)
        while ended.is_loss:
            if not self.head.answers():
                return self._give_up(self._headless(ended))
            if len(self.restarts) >= self.config.max_restarts:
                return self._give_up(f"{ended.cause}{self._used_up()}")
            resumed = self._go_on_from(ended, resumed)
            iteration = iterations(resumed.checkpoints)[0] if resumed else 0
            seconds = monotonic() - begun
            self.restarts.append({"cause": ended.cause, "iteration": iteration, "seconds": seconds})
            self._tell_restart(ended.cause, iteration)
            try:
                ended = self._attempt(resumed)
            except TooFewError as error:
                return self._give_up(f"{ended.cause}; a restart {error.situation}")
        if ended.outcome is None:
            raise ended.error or RunError("the run ended without a word")
        return self._told(ended.outcome)

    def _attempt(self, resumed: RunFolder | None) -> _Ended:
        config, say = self.config, _say_nothing if self.quiet else _say
        self.signals.raise_on_signal = True
        patience = config.rendezvous_seconds
        try:
            with ray_machines(
                resources_for(config), self.head, patience, say, self.first
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
            # Then it was stopped by us.
            return True
        if isinstance(error, StoppedError):
            return False
        return bool(machines.lost or (result and result.get("is_loss")))

    def _go_on_from(self, ended: _Ended, resumed: RunFolder | None) -> RunFolder | None:
        """The folder with a checkpoint; where there is none, what was done is set aside."""
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

    def _tell_restart(self, cause: str, iteration: int) -> None:
        count, most = len(self.restarts), self.config.max_restarts
        begin = f"after iteration {iteration}"
        if not iteration:
            begin = "from the beginning"
            if self.config.checkpoint_every == "never":
                begin += ", for want of --checkpoint-every"
        if not self.quiet:
            _say(f"{cause}: restart {count} of {most} {begin}")

    def _headless(self, ended: _Ended) -> str:
        if isinstance(ended.error, HeadLostError):
            return str(ended.error)
        result = ended.outcome.result if ended.outcome else None
        if result and result["status"] == "stopped":
            came_to = f"stopped after iteration {result['iterations']}"
        else:
            came_to = ended.cause
        return str(HeadLostError(self.head, came_to))

    def _used_up(self) -> str:
        most = self.config.max_restarts
        return f" (--max-restarts {most} are used up)" if most else ""

    def _give_up(self, cause: str) -> RunOutcome:
        if self.last is None or self.last.result is None:
            raise RunError(cause)
        folder = self.last.folder
        if not folder.path.is_dir():
            # It was set aside for an attempt that did not come about.
            path, name = self.aside.pop()
            path.with_name(name).rename(path)
        result = {**self.last.result, "status": "failed", "cause": cause}
        return self._told(RunOutcome(folder, result, RunError.exit_code))

    def _told(self, outcome: RunOutcome) -> RunOutcome:
        """With the restarts in its result."""
        if outcome.result is None:
            return outcome
        result = outcome.result | ({"restarts": self.restarts} if self.restarts else {})
        outcome.folder.write_result(result)
        return outcome._replace(result=result)
