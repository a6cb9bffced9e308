"""Processes by id and time of birth: finding those inside a cluster, and ending them."""

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
    """A process for good, though ids are used again."""

    pid: int
    born_ticks: int
    """Since the machine's start."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """ProcessLookupError where there is no such process."""
        born = _born_ticks(pid)
        if born is None:
            raise ProcessLookupError(pid)
        return cls(pid, born)

    def is_alive(self) -> bool:
        return _born_ticks(self.pid) == self.born_ticks


def boot_id() -> str:
    """What tells this start of the machine from others."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def process_space() -> str:
    """What all processes have in common that know one another by their numbers, and no others.

    The machine's name would not do: it may change meanwhile.
    """
    try:
        numbering = str((PROC / "self/ns/pid").stat().st_ino)
    except OSError:
        numbering = "all"
    return f"{boot_id() or platform.node()}-{numbering}"


def network_namespace(pid: int) -> int | None:
    """The number of the network namespace that a process is in; None where it cannot be seen."""
    try:
        return (PROC / str(pid) / "ns/net").stat().st_ino
    except OSError:
        return None


def in_namespaces(namespaces: Iterable[int]) -> list[int]:
    wanted = set(namespaces)
    return [pid for pid in all_pids() if network_namespace(pid) in wanted] if wanted else []


def with_variable(name: str, value: str) -> list[int]:
    """Processes that were started with a variable of this value."""
    wanted = f"{name}={value}".encode()
    return [pid for pid in all_pids() if wanted in _environment(pid)]


def end_all(find: Callable[[], Iterable[int]], grace_seconds: float = 1.0) -> list[int]:
    """End what `find` finds, again and again until it finds nothing; returns what would not go.

    Asked to go first, killed when the grace is over; another 3 seconds are the bound.
    """
    patience = time.monotonic() + grace_seconds
    deadline = patience + 3
    asked: set[ProcessId] = set()
    while remaining := _living(find()) | {process for process in asked if process.is_alive()}:
        is_late = time.monotonic() >= patience
        for process in remaining if is_late else remaining - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= remaining
        if time.monotonic() >= deadline:
            return sorted(process.pid for process in remaining)
        time.sleep(0.005)
    return []


def reap(processes: Iterable[ProcessId]) -> None:
    """Collect ended processes, should they be children of this one: no zombies stay."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _living(pids: Iterable[int]) -> set[ProcessId]:
    """Never this process itself, wherever it is."""
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


def _born_ticks(pid: int) -> int | None:
    """None for a zombie as well: it holds nothing any more."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
