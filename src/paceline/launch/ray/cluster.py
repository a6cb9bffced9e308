"""The connection to a Ray cluster, and a monitor of its head.

Ray kills every program that has not reached the cluster's head for a minute, and most calls to Ray
hang until then. `HeadMonitor` detects a lost head earlier, so that a run can end properly.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from types import ModuleType
from typing import Any

from paceline.errors import PacelineError, RunError, StoppedError, UsageError, error_line

FIRST_SECONDS = 5.0
"""How long a cluster may take to answer at first."""
ANSWER_POLL_SECONDS = 0.5
STORE_BYTES = 100_000_000
"""Object store size of a Ray that is started here, which holds few and small objects."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Variables that turn off usage statistics and irrelevant warnings of Ray."""

Say = Callable[[str], None]


class LostError(RunError):
    """An actor or its machine is lost."""


class HeadLostError(LostError):
    """Ray's head is lost."""

    def __init__(self, head: HeadMonitor, situation: str) -> None:
        super().__init__(f"lost Ray's head at {head.address}: {situation}")


@dataclass(slots=True)
class Connection:
    """A connection to a Ray cluster."""

    head: HeadMonitor
    exit_code: int = 0
    """The exit code of this process if the head is lost; an error that leaves the block sets its
    own."""


def load() -> ModuleType:
    """Import Ray, which is optional and slow to load."""
    return importlib.import_module("ray")


def _check_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--launcher ray: Ray is not installed: pip install 'paceline[ray]'")


@contextlib.contextmanager
def connected(slots: int, say: Say) -> Iterator[Connection]:
    """Connect to a Ray cluster and monitor its head, for the duration of the block.

    The cluster is the one at $RAY_ADDRESS, otherwise one that runs on this machine, otherwise a
    local one with at least this many slots, which ends with the block.
    """
    address = os.environ.get("RAY_ADDRESS")
    _check_installed()
    _check_reachable(address)
    with _variables(QUIET), contextlib.ExitStack() as stack:
        ray = load()
        if ray.is_initialized():
            raise UsageError("--launcher ray: this process is connected to Ray already")
        # Losses are reported here in one line; Ray would report them at length as well.
        vars(importlib.import_module("ray._private.worker"))["_worker_logs_enabled"] = False
        if not _is_connected(ray, address):
            say("no Ray cluster is running: starting one on this machine")
            _start(ray, slots, stack.enter_context(_short_folder()))
        head = HeadMonitor(str(ray.get_runtime_context().gcs_address))
        with _disconnecting(ray, head) as connection:
            yield connection


@contextlib.contextmanager
def _disconnecting(ray: ModuleType, head: HeadMonitor) -> Iterator[Connection]:
    """Disconnect from Ray at the end of the block, if its head still answers."""
    connection = Connection(head)
    try:
        yield connection
    except BaseException as error:
        connection.exit_code = _exit_code_of(error)
        raise
    finally:
        is_reachable = False
        try:
            is_reachable = head.answers()
        finally:
            head.close()
            if is_reachable:
                ray.shutdown()
            else:
                # Disconnecting would hang, now or at the end of this process.
                atexit.register(_exit_at_once, connection.exit_code)


def _exit_code_of(error: BaseException) -> int:
    """The exit code of a command that fails with this error."""
    if isinstance(error, KeyboardInterrupt):
        return StoppedError.exit_code
    return error.exit_code if isinstance(error, PacelineError) else RunError.exit_code


def _exit_at_once(exit_code: int) -> None:
    """Exit before Ray's own exit handlers: the handler registered last runs first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for Ray's sockets, whose paths must be short."""
    parent = "/tmp" if Path("/tmp").is_dir() else None
    return tempfile.TemporaryDirectory(prefix="ray-", dir=parent, ignore_cleanup_errors=True)


def _is_connected(ray: ModuleType, address: str | None) -> bool:
    """Connect if there is a cluster; returns whether there is."""
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        if address is None and isinstance(error, ConnectionError):
            return False
        raise UsageError(_unreachable(address or "auto", error_line(error))) from None
    return True


def _start(ray: ModuleType, slots: int, folder: str) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        ray.init(
            address="local",
            num_cpus=max(slots, cores or 1),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds
        raise RunError(f"--launcher ray: Ray cannot start here ({error_line(error)})") from None


def _check_reachable(address: str | None) -> None:
    """Check it first, because Ray would try for a minute and then kill this process."""
    if address is not None and (problem := connection_error(address, FIRST_SECONDS)):
        raise UsageError(_unreachable(address, problem))


def _unreachable(address: str, why: str) -> str:
    return (
        f"--launcher ray: no Ray cluster can be used at {address} ({why}): start one with"
        " `ray start --head`, or set another in $RAY_ADDRESS"
    )


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({**values, **{name: text for name, text in before.items() if text}})
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)


def ask_all(answers: list[Any], head: HeadMonitor, seconds: float) -> list[Any]:
    """Wait for the results of calls to actors; LostError if one does not answer."""
    ray, deadline = load(), monotonic() + seconds
    while True:
        try:
            return list(ray.get(answers, timeout=ANSWER_POLL_SECONDS))
        except ray.exceptions.GetTimeoutError:
            if head.is_lost:
                raise HeadLostError(head, "an actor of Ray does not answer") from None
            if monotonic() > deadline:
                raise LostError(f"an actor of Ray does not answer for {seconds:g} s") from None
        except ray.exceptions.RayError as error:
            raise LostError(f"an actor of Ray does not answer: {cause_of(error)}") from None


def cause_of(error: Exception) -> str:
    """The last line of Ray's message, which is the error on the other machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


SILENCE_SECONDS = 12.0
"""Without an answer for this long, the head is lost: longer than brief network outages."""
POLL_SECONDS = 1.0
CONNECT_SECONDS = 2.0


class HeadMonitor:
    """Monitors a head until it is closed; a head that was never reachable is never lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_lost = False
        """Once it is, calls to Ray itself hang; actors still answer for a while."""
        self.lost_at = float("inf")
        self._answered = monotonic()
        self._is_closed = Event()
        # Behind a proxy, Ray may report an address that is not reachable from here.
        self._is_watched = connection_error(address) is None
        self._thread = Thread(target=self._watch, name="ray head", daemon=True)
        self._thread.start()

    def answers(self) -> bool:
        """Whether the head answers; if it is silent, waits until it is lost or back."""
        while self._is_watched and not self.is_lost:
            if connection_error(self.address) is None:
                return True
            sleep(POLL_SECONDS)
        return not self.is_lost

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._is_watched and not self.is_lost and not self._is_closed.wait(POLL_SECONDS):
            if connection_error(self.address) is None:
                self._answered = monotonic()
            elif monotonic() - self._answered > SILENCE_SECONDS:
                self.lost_at = monotonic()
                self.is_lost = True


def connection_error(address: str, seconds: float = CONNECT_SECONDS) -> str | None:
    """Why `host:port` cannot be reached; None if it can, or if the address has another form."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+)\]?:(\d+)", address)
    if match is None:
        return None
    try:
        socket.create_connection((match[1], int(match[2])), seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
