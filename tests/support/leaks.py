"""Leak check: processes, threads, shared memory, sockets, environment and current folder.

`take()` returns a snapshot; `leaks_since(before)` returns one line per thing that was added since
and remains. `no_leaks` applies both to every test and `no_leaks_of_session` to the whole session; a
conftest imports them together with `pytest_fixture_setup`. Fixtures of wider scope may hold worker
groups: pytest sets them up before `no_leaks` takes its snapshot, and what a fixture requested later
(`getfixturevalue`) starts is added to the snapshot.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest

GRACE_SECONDS = 2.0
"""Time for processes and threads that are already exiting."""

SESSION_TAG = "PACELINE_TEST_SESSION"
"""Every program that a test starts inherits this variable, which identifies it after its parent has
exited."""

SHARED_MEMORY = Path("/dev/shm")

ALLOWED_THREADS = {
    "tqdm": "a progress bar's monitor, one for the whole process",
    "pytest_timeout": "the watchdog that bounds this very test",
}
"""Name prefixes of threads that may remain, and why."""

ALLOWED_VARIABLES = {
    "PYTEST_CURRENT_TEST": "pytest changes it before each phase of a test",
    "TORCHINDUCTOR_CACHE_DIR": "torch names its cache when its compiler is first loaded",
}
"""Environment variables that may change, and why."""

Items = Mapping[Any, str]
"""Descriptions by identity."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The resources in use at one moment."""

    processes: Items
    threads: Items
    shared_memory: Items
    sockets: Items
    environment: Mapping[str, str]
    folder: str

    def including(self, begin: Snapshot, end: Snapshot) -> Snapshot:
        """Return this snapshot plus what was added between two others."""
        return replace(
            self,
            processes={**self.processes, **_added(begin.processes, end.processes)},
            threads={**self.threads, **_added(begin.threads, end.threads)},
            shared_memory={**self.shared_memory, **_added(begin.shared_memory, end.shared_memory)},
            sockets={**self.sockets, **_added(begin.sockets, end.sockets)},
            environment={**self.environment, **_changed(begin.environment, end.environment)},
        )


def take() -> Snapshot:
    return Snapshot(
        processes=_processes(),
        threads=_threads(),
        shared_memory=_shared_memory(),
        sockets=_sockets(),
        environment=_environment(),
        folder=_current_folder(),
    )


def leaks_since(before: Snapshot, grace_seconds: float | None = None) -> list[str]:
    """Describe what was added since `before` and remains.

    Kills leaked processes and restores the environment and the current folder, so that a leak fails
    one test only.
    """
    deadline = time.monotonic() + (GRACE_SECONDS if grace_seconds is None else grace_seconds)
    processes = _remaining(_processes, before.processes, deadline)
    for pid, _ in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    threads = _remaining(_threads, before.threads, deadline)
    shared = _not_held_by_others(_remaining(_shared_memory, before.shared_memory, deadline))
    sockets = _remaining(_sockets, before.sockets, deadline)
    return [
        *(f"process {text}" for text in processes.values()),
        *(f"thread {text}" for text in threads.values()),
        *(f"shared memory {text}" for text in shared.values()),
        *(f"socket {text}" for text in sockets.values()),
        *_restore_environment(before),
        *_restore_folder(before),
    ]


def _added(before: Items, now: Items) -> dict[Any, str]:
    return {key: text for key, text in now.items() if key not in before}


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in now.items() if before.get(name) != value}


def _remaining(look: Callable[[], Items], before: Items, deadline: float) -> dict[Any, str]:
    """Return what is new and still exists at the deadline."""
    found = _added(before, look())
    if found:
        gc.collect()  # reference cycles may keep sockets and threads alive
        found = _added(before, look())
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = _added(before, look())
    return found


def _processes() -> dict[Any, str]:
    """Running descendants of this process and their orphans, by (pid, start time)."""
    multiprocessing.active_children()  # reaps those that ended without being joined
    found = {}
    for pid in _related_pids() - _helper_pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())[:200] or process.name()
                found[pid, _start_ticks(pid)] = f"{pid} ({command})"
    return found


def _start_ticks(pid: int) -> int:
    """When a process started, since boot.

    The time of day of it, which psutil returns, changes when the clock of the machine is set.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None


def _helper_pids() -> set[int]:
    """This process, and the helpers that multiprocessing keeps until it exits."""
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    server = getattr(forkserver, "_forkserver", None)
    return {
        os.getpid(),
        getattr(tracker, "_pid", None) or 0,
        getattr(server, "_forkserver_pid", None) or 0,
    }


_unrelated: set[int] = set()
"""Processes that are neither descendants nor tagged, and never will be. This cache makes a check
cheap: without it, each one would read two files of every process on the machine."""


def _related_pids() -> set[int]:
    """Descendants of this process, and processes with the tag of this session."""
    existing = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - faster
    _unrelated.intersection_update(existing)
    parents = {pid: _parent_pid(pid) for pid in existing - _unrelated}
    tag = f"{SESSION_TAG}={os.environ.get(SESSION_TAG)}".encode()
    related = set()
    for pid in parents:
        if _is_descendant(pid, parents) or _has_variable(pid, tag):
            related.add(pid)
        else:
            _unrelated.add(pid)
    return related


def _parent_pid(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        # The name of the program comes first, in parentheses, and may contain anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _is_descendant(pid: int, parents: Mapping[int, int]) -> bool:
    while pid in parents:
        if pid == os.getpid():
            return True
        pid = parents[pid]
    return False


def _has_variable(pid: int, variable: bytes) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _threads() -> dict[Any, str]:
    # A dummy stands for a C++ thread that called into Python, such as those of autograd.
    return {
        thread: f"{thread.name!r} ({'daemon' if thread.daemon else 'not daemon'})"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(tuple(ALLOWED_THREADS))
    }


def _shared_memory() -> dict[Any, str]:
    """This user's entries, by (name, inode)."""
    found = {}
    entries = SHARED_MEMORY.iterdir() if SHARED_MEMORY.is_dir() else ()
    for entry in entries:
        with contextlib.suppress(OSError):
            status = entry.stat()
            if status.st_uid == os.getuid():
                found[entry.name, status.st_ino] = f"{entry} ({status.st_size} bytes)"
    return found


def _not_held_by_others(shared: dict[Any, str]) -> dict[Any, str]:
    """Remove entries that unrelated processes have mapped."""
    if not shared:
        return shared
    related = {os.getpid(), *(pid for pid, _ in _processes())}
    mapped_by_others = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in related:
            with contextlib.suppress(OSError):
                lines = (entry / "maps").read_text().splitlines()
                mapped_by_others |= {line.partition("/dev/shm/")[2] for line in lines}
    return {key: text for key, text in shared.items() if key[0] not in mapped_by_others}


def _sockets() -> dict[Any, str]:
    """Open sockets of this process, by inode."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[target] = f"{target} as file descriptor {entry.name}"
    return found


def _environment() -> dict[str, str]:
    allowed = tuple(ALLOWED_VARIABLES)
    return {name: value for name, value in os.environ.items() if not name.startswith(allowed)}


def _restore_environment(before: Snapshot) -> list[str]:
    now = _environment()
    found = []
    for name in sorted({*before.environment, *now}):
        wanted = before.environment.get(name)
        if wanted == now.get(name):
            continue
        found.append(f"environment variable {name}: was {wanted!r}, left as {now.get(name)!r}")
        if wanted is None:
            del os.environ[name]
        else:
            os.environ[name] = wanted
    return found


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "a removed folder"


def _restore_folder(before: Snapshot) -> list[str]:
    left_in = _current_folder()
    if left_in == before.folder:
        return []
    os.chdir(before.folder)
    return [f"current folder: was {before.folder}, left as {left_in}"]


_SNAPSHOT = pytest.StashKey[Snapshot]()
"""The snapshot from before the running test."""


@pytest.fixture(scope="session", autouse=True)
def no_leaks_of_session() -> Iterator[None]:
    """Fail the last test if a fixture of wider scope leaks."""
    os.environ[SESSION_TAG] = uuid.uuid4().hex
    before = take()
    yield
    found = leaks_since(before)
    del os.environ[SESSION_TAG]
    if found:
        pytest.fail("the test session leaked:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks."""
    stash = request.session.stash
    stash[_SNAPSHOT] = take()
    yield
    before = stash[_SNAPSHOT]
    del stash[_SNAPSHOT]
    found = leaks_since(before)
    if found:
        pytest.fail("the test leaked:\n  " + "\n  ".join(found), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Add what a fixture of wider scope starts during a test to the snapshot."""
    stash = request.session.stash
    if fixturedef.scope == "function" or _SNAPSHOT not in stash:
        return (yield)
    begin = take()
    try:
        return (yield)
    finally:
        stash[_SNAPSHOT] = stash[_SNAPSHOT].including(begin, take())
