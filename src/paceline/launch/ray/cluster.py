"""A Ray cluster: connecting to it, and asking its actors.

Ray's head, the process that knows all of a cluster: whether it still answers.

Ray ends every program that has not reached its head for a minute, at once and in its own words, and
most questions to Ray hang until then. So it is watched from here, and a run ends before that."""

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
"""How long a cluster may take to answer when it is first asked."""
ANSWER_POLL_SECONDS = 0.5
STORE_BYTES = 100_000_000
"""Of a Ray that is started here, which has few and small objects to hold."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
}
"""Variables that keep Ray from reporting home and from warning of what does not concern us."""

Say = Callable[[str], None]


class LostError(RunError):
    """An actor is gone, or its machine with it."""


class HeadLostError(LostError):
    """Ray's head, and with it all that it would still have to do."""

    def __init__(self, head: HeadMonitor, came_to: str) -> None:
        super().__init__(f"lost Ray's head at {head.address}: {came_to}")


@dataclass(slots=True)
class Connection:
    """To a Ray cluster."""

    head: HeadMonitor
    exit_code: int = 0
    """What this process ends with where the head is lost; an error that leaves the block has its
    own."""


def load() -> ModuleType:
    """Ray itself, which not everybody has, and which takes a second to load."""
    return importlib.import_module("ray")


def _check_that_it_is_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--launcher ray: Ray is not installed: pip install 'paceline[ray]'")


@contextlib.contextmanager
def connected(slots: int, say: Say) -> Iterator[Connection]:
    """Inside, this process drives a Ray cluster, whose head is watched meanwhile.

    $RAY_ADDRESS names it, else one that runs on this machine is found, else one of this machine
    alone, with at least so many slots, is started and ended with the block.
    """
    address = os.environ.get("RAY_ADDRESS")
    _check_that_it_is_installed()
    _check_that_it_answers(address)
    with _variables(QUIET), contextlib.ExitStack() as stack:
        ray = load()
        if ray.is_initialized():
            raise UsageError("--launcher ray: this process is connected to Ray already")
        # What was lost is told by us, in a line; Ray would tell it at length as well.
        vars(importlib.import_module("ray._private.worker"))["_worker_logs_enabled"] = False
        if not _is_connected(ray, address):
            say("no Ray cluster is running: starting one on this machine")
            _start(ray, slots, stack.enter_context(_short_folder()))
        with _left(ray, HeadMonitor(str(ray.get_runtime_context().gcs_address))) as connection:
            yield connection


@contextlib.contextmanager
def _left(ray: ModuleType, head: HeadMonitor) -> Iterator[Connection]:
    """At the end of the block, if Ray can still be taken leave of."""
    connection = Connection(head)
    try:
        yield connection
    except BaseException as error:
        connection.exit_code = _exit_code_of(error)
        raise
    finally:
        is_there = False
        try:
            is_there = head.answers()
        finally:
            head.close()
            if is_there:
                ray.shutdown()
            else:
                # Taking leave would hang, now or at the end of this process.
                atexit.register(_end_at_once, connection.exit_code)


def _exit_code_of(error: BaseException) -> int:
    """Of the command that it ends."""
    if isinstance(error, KeyboardInterrupt):
        return StoppedError.exit_code
    return error.exit_code if isinstance(error, PacelineError) else RunError.exit_code


def _end_at_once(exit_code: int) -> None:
    """Before Ray's own ways of termination, since what is registered last comes first."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """Ray's sockets lie in it, whose paths must be short."""
    place = "/tmp" if Path("/tmp").is_dir() else None
    return tempfile.TemporaryDirectory(prefix="ray-", dir=place, ignore_cleanup_errors=True)


def _is_connected(ray: ModuleType, address: str | None) -> bool:
    """Connect, if there is a cluster."""
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # noqa: BLE001 - whatever Ray found, it cannot be used
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
    except Exception as error:  # noqa: BLE001 - Ray has many reasons
        raise RunError(f"--launcher ray: Ray cannot start here ({error_line(error)})") from None


def _check_that_it_answers(address: str | None) -> None:
    """Ray itself would try for a minute, and then end this process."""
    if address is not None and (problem := try_to_connect(address, FIRST_SECONDS)):
        raise UsageError(_unreachable(address, problem))


def _unreachable(address: str, why: str) -> str:
    return (
        f"--launcher ray: no Ray cluster can be used at {address} ({why}): start one with"
        " `ray start --head`, or name another in $RAY_ADDRESS"
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
    """What actors answer, all of them."""
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
    """The last line of what Ray quotes, which is what the other machine said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


SILENCE_SECONDS = 12.0
"""Without an answer it is held to be lost: longer than a cable is out, and far below a minute."""
LOOK_SECONDS = 1.0
CONNECT_SECONDS = 2.0


class HeadMonitor:
    """Watches a head until it is closed; one that was never reached from here is never lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_lost = False
        """Once it is, nothing more may be asked of Ray itself; actors still answer for a while."""
        self.lost_at = float("inf")
        self._answered = monotonic()
        self._is_closed = Event()
        # Through a proxy, Ray may know it by an address that is none here.
        self._is_watched = try_to_connect(address) is None
        self._thread = Thread(target=self._watch, name="ray head", daemon=True)
        self._thread.start()

    def answers(self) -> bool:
        """Whether it does; if it is silent now, waits until it is lost or back."""
        while self._is_watched and not self.is_lost:
            if try_to_connect(self.address) is None:
                return True
            sleep(LOOK_SECONDS)
        return not self.is_lost

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._is_watched and not self.is_lost and not self._is_closed.wait(LOOK_SECONDS):
            if try_to_connect(self.address) is None:
                self._answered = monotonic()
            elif monotonic() - self._answered > SILENCE_SECONDS:
                self.lost_at = monotonic()
                self.is_lost = True


def try_to_connect(address: str, seconds: float = CONNECT_SECONDS) -> str | None:
    """Why nothing is reached at `host:port`; None where something is, or it is no such address."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+)\]?:(\d+)", address)
    if match is None:
        return None
    try:
        socket.create_connection((match[1], int(match[2])), seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
