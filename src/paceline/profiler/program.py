"""Profiles from Python: `paceline.profile`, `paceline.step` and the notebook extension."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import (  # type: ignore[attr-defined]  # torch does not list it
    DistError,
    PrefixStore,
    Store,
    TCPStore,
    distributed_c10d,
)

from paceline.comm.rank_info import RankInfo
from paceline.config import RunSettings
from paceline.errors import RecordsError, RunError, UsageError, error_line
from paceline.measure.sampler import ResourceSampler
from paceline.profiler import FOLDER_VARIABLE, session
from paceline.profiler.collection import discard_if_empty, settings_of_command, write_result
from paceline.profiler.rank_log import find_rank
from paceline.profiler.step_window import StepWindow
from paceline.records import Result, RunFolder, default_name

START_SECONDS, END_SECONDS = 60.0, 10.0
"""How long ranks wait for rank 0 to create the folder, and rank 0 for the others to end."""

_PROFILES = count()
"""A program may profile several times; each time has its own keys in the store."""


@dataclass(slots=True)
class Profile:
    """A profile of this program."""

    folder: Path
    result: Result | None = None
    """The contents of result.json, on rank 0 after the block; None if it cannot be written."""


@contextmanager
def profile(
    *, out: str = "runs", name: str | None = None, steps: str = "", trace: bool = False
) -> Iterator[Profile]:
    """Measure the training in a `with` block, like `paceline profile`.

    `steps` and `trace` are those of the command line: the steps to measure, such as `20:120`, and
    whether to write a timeline. RecordsError on all ranks if `name` exists in `out`.
    All ranks enter and leave the block; if torchrun did not start them, they call
    `init_process_group` before it. Under `paceline profile`, or inside another block, the program
    is measured already, and the block does nothing.
    """
    active = session.active()
    if folder := active.folder if active else os.environ.get(FOLDER_VARIABLE):
        yield Profile(Path(folder))
        return
    StepWindow.parse(steps)
    ranks = _Ranks()
    settings = settings_of_command(list(sys.argv) or ["python"], name, steps)
    folder = ranks.share(lambda: _create(settings, out, name))
    profile = Profile(Path(folder))
    sampler = ResourceSampler(RunFolder(profile.folder).resources_file(0), ranks.processes())
    if ranks.is_first:
        sampler.start()
    measured = session.start(folder, steps, has_trace=trace)
    status, cause, failure = "finished", None, None
    try:
        yield profile
    except BaseException as error:
        status, cause, failure = "failed", error_line(error), error
        raise
    finally:
        if measured is not None:
            session.stop(measured, failure)
        ranks.wait_for_all()
        if ranks.is_first:
            warning = sampler.stop()
            run_folder = RunFolder(profile.folder)
            warnings = [warning] if warning else []
            try:
                profile.result = write_result(run_folder, settings, status, cause, warnings)
                discard_if_empty(run_folder, profile.result)
            except (RunError, OSError) as error:
                # The program goes on without the records.
                sys.stderr.write(f"paceline: the records are incomplete: {error}\n")


def step() -> None:
    """End a step here, for loops whose steps are not those of a torch optimizer.

    After the first call, optimizer steps do not end steps. Without a profile, it does nothing.
    """
    active = session.active()
    if active is not None:
        active.end_step()


def _create(settings: RunSettings, out: str, name: str | None) -> str:
    stem = Path(settings.script or "python").stem
    path = Path(out) / (name or default_name(Path(out), stem, "profile"))
    folder = RunFolder.create_at(path, settings, out=f"out={out!r}", name="name")
    return str(folder.path.resolve())


def _shared_store(rank: RankInfo) -> Store | None:
    """The store of the process group, else that of torchrun; None if this is the only rank."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return distributed_c10d._get_default_store()
    if rank.world_size == 1 and not _has_rank_of_script():
        return None
    if rank.has_external_store:
        timeout = timedelta(seconds=START_SECONDS)
        with suppress(DistError):
            return TCPStore(
                rank.master_addr, rank.master_port, is_master=False, timeout=timeout,
                wait_for_workers=False,
            )  # fmt: skip
    raise UsageError("the ranks are not connected yet: call init_process_group before profile()")


def _has_rank_of_script() -> bool:
    """Whether this is one of several ranks of a launcher that `environment.detect` ignores."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


class _Ranks:
    """The ranks of the program; they agree through a store that all of them reach."""

    def __init__(self) -> None:
        rank = find_rank()
        self._rank, self._world_size = rank.rank, rank.world_size
        store = _shared_store(rank)
        # The store of a launcher outlasts a restart of the ranks.
        prefix = f"paceline/profile/{rank.restart_count}/{next(_PROFILES)}"
        self._store = None if store is None else PrefixStore(prefix, store)

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    def share(self, create: Any) -> str:
        """Call `create` on rank 0 and return its text on all; an error is raised on all."""
        if self._store is None:
            return str(create())
        self._store.set(f"process/{self._rank}", f"{os.getpid()} {socket.gethostname()}")
        if self._rank == 0:
            try:
                self._store.set("folder", create())
            except UsageError as error:
                self._store.set("error", str(error))
                self._store.set("folder", "")
        self._store.wait(["folder"], timedelta(seconds=START_SECONDS))
        folder = self._store.get("folder").decode()
        if not folder:
            raise RecordsError(self._store.get("error").decode())
        return folder

    def processes(self) -> list[int]:
        """Ids of the processes of all ranks on this machine."""
        if self._store is None:
            return [os.getpid()]
        keys = [f"process/{rank}" for rank in range(self._world_size)]
        self._store.wait(keys, timedelta(seconds=START_SECONDS))
        places = [self._store.get(key).decode().partition(" ") for key in keys]
        return [int(process) for process, _, host in places if host == socket.gethostname()]

    def wait_for_all(self) -> None:
        """On rank 0, wait until the others have written their records, or for some seconds."""
        if self._store is None:
            return
        deadline = time.monotonic() + END_SECONDS
        keys = [f"end/{rank}" for rank in range(self._world_size)]
        # The store may have ended with the process that serves it.
        with suppress(DistError):
            self._store.set(f"end/{self._rank}", "")
            while self._rank == 0 and time.monotonic() < deadline and not self._store.check(keys):
                time.sleep(0.01)
