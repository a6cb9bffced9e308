"""Find and end the processes of a cluster, identified by pid and start time."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessId(NamedTuple):
    """A pid with its start time, because pids are reused."""

    pid: int
    start_ticks: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """ProcessLookupError if there is no such process."""
        start_ticks = _start_ticks(pid)
        if start_ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid, start_ticks)

    def is_alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks


def boot_id() -> str:
    """Identifier of the current boot; empty if unavailable."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_space() -> str:
    """Identifier of this boot and pid namespace, within which pids are meaningful.

    The host name is not used where a boot id exists, because it can change.
    """
    try:
        pid_namespace = str((PROC / "self/ns/pid").stat().st_ino)
    except OSError:
        pid_namespace = "all"
    return f"{boot_id() or platform.node()}-{pid_namespace}"


def network_namespace(pid: int) -> int | None:
    """Inode of a process's network namespace; None if it is not visible."""
    try:
        return (PROC / str(pid) / "ns/net").stat().st_ino
    except OSError:
        return None


def pids_in_namespaces(namespaces: Iterable[int]) -> list[int]:
    wanted = set(namespaces)
    return [pid for pid in all_pids() if network_namespace(pid) in wanted] if wanted else []


def pids_with_variable(name: str, value: str) -> list[int]:
    """Processes whose initial environment has this variable with this value."""
    wanted = f"{name}={value}".encode()
    return [pid for pid in all_pids() if wanted in _environment(pid)]


def end_all(find: Callable[[], Iterable[int]], grace_seconds: float = 1.0) -> list[int]:
    """Terminate processes until `find` returns none; returns those that did not end.

    Sends SIGTERM first and SIGKILL after the grace period, and gives up 3 seconds later.
    """
    kill_time = time.monotonic() + grace_seconds
    deadline = kill_time + 3
    signaled: set[ProcessId] = set()
    while remaining := _alive(find()) | {process for process in signaled if process.is_alive()}:
        is_late = time.monotonic() >= kill_time
        for process in remaining if is_late else remaining - signaled:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL if is_late else signal.SIGTERM)
        signaled |= remaining
        if time.monotonic() >= deadline:
            return sorted(process.pid for process in remaining)
        time.sleep(0.005)
    return []


def reap(processes: Iterable[ProcessId]) -> None:
    """Reap ended processes that are children of this one, so that no zombies remain."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _alive(pids: Iterable[int]) -> set[ProcessId]:
    """The living processes, without this one."""
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            if pid != os.getpid():
                found.add(ProcessId.of(pid))
    return found


def all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def _environment(pid: int) -> list[bytes]:
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _start_ticks(pid: int) -> int | None:
    """None if the process does not exist or is a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
