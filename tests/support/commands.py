"""Start `paceline train` as users do, observe it, and inject faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Self

import psutil
import pytest

from paceline.config import flag_of, from_mapping
from paceline.launch import launcher as start
from paceline.launch.result import RunOutcome
from tests.support.warm import PrewarmedStarter, warm_spawning

HERE = Path(__file__).parent
"""The folder of user_code.py. Programs run here, since Python searches the current folder."""

LIMIT_SECONDS = 90.0
"""Far more than any test takes, even on a busy machine."""

TINY: dict[str, Any] = {
    "data": "user_code:data",
    "model": "user_code:Plain",
    "strategy": "allreduce",
    "batch_size": 12,
    "iterations": 12,
    "tensorboard": False,
    "sample_seconds": 0.2,
    "rendezvous_seconds": 40,
    "timeout_seconds": 40,
}
ENDLESS = {"model": "user_code:Slow", "iterations": 100_000}
SLOW = {"OWN_SLEEP_SECONDS": "0.05"}


def flags(settings: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            words += [flag_of(name), str(value)]
    return words


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Command:
    """A running program, killed at the end of its block."""

    starter: PrewarmedStarter | None = None
    """If set, paceline commands start from it."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        environment = {**os.environ, **(variables or {})}
        self.process: subprocess.Popen[str]
        if self.starter and list(words[:2]) == ["-m", "paceline"]:
            pipe = subprocess.PIPE
            self.process = self.starter.start(
                words, stdout=pipe, stderr=pipe, cwd=HERE, env=environment
            )
            return
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()

    def end(self) -> Ended:
        """Wait for the program to exit."""
        out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        return Ended(self.process.returncode, out, err)


@contextmanager
def warm_commands(starter: PrewarmedStarter) -> Iterator[pytest.MonkeyPatch]:
    """Start commands and workers of this process from a starter, in the folder of user_code.py."""
    with pytest.MonkeyPatch.context() as patch, warm_spawning(starter):
        patch.chdir(HERE)
        patch.setattr(Command, "starter", starter)
        yield patch


def train(out: Path, variables: Mapping[str, str] | None = None, **settings: Any) -> Command:
    words = flags({**TINY, "out": out, "name": "run", **settings})
    return Command(["-m", "paceline", "train", *words], variables)


def node(out: Path, rank: int, port: int, variables: Any = None, **settings: Any) -> Command:
    return train(out, variables, node_rank=rank, master_port=port, **settings)


def run_nodes(outs: list[Path], late_seconds: float = 0.0, **settings: Any) -> list[Ended]:
    """Run one command per folder; the last starts `late_seconds` later."""
    port = free_port()
    with contextlib.ExitStack() as stack:
        commands = []
        for rank, out in enumerate(outs):
            time.sleep(late_seconds if rank == len(outs) - 1 else 0)
            one = node(out, rank, port, nnodes=len(outs), **settings)
            commands.append(stack.enter_context(one))
        return [command.end() for command in commands]


def launch(out: Path, **settings: Any) -> RunOutcome:
    """Launch a run from this process, which has already imported torch."""
    values = {**TINY, "out": str(out), "name": "run", **settings}
    return start.train(from_mapping(values), quiet=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def workers_of(launcher: int) -> dict[int, psutil.Process]:
    """Return the worker processes of a launcher, by rank."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            rank = rank_of(child)
            if rank is not None:
                found[rank] = child
    return found


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a worker process; None for any other process."""
    with contextlib.suppress(psutil.Error, KeyError):
        # A fork has the command line and the first environment of its server.
        if forked := re.fullmatch(r"(?:comm )?worker (\d+)", process.name()):
            return int(forked[1])
        if "paceline.launch.child_main" in process.cmdline():
            return int(process.environ()["RANK"])
    return None


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


def is_training(folder: Path, ranks: Sequence[int] = (0, 1)) -> bool:
    """Return whether all these workers have recorded iterations."""
    files = [folder / f"events-{rank}.jsonl" for rank in ranks]
    return all(file.exists() and '"iterations"' in file.read_text() for file in files)


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(map(_is_alive, processes))


def _is_alive(process: psutil.Process) -> bool:
    # It may exit between two calls.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def alongside(action: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread while the block runs."""
    thread = Thread(target=action, name="alongside")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def sabotage(
    folder: Path, rank: int, number: signal.Signals, while_training: bool
) -> Iterator[None]:
    """Send a signal to a worker of the run that this process launches inside the block."""

    def strike() -> None:
        wait_until(lambda: len(workers_of(os.getpid())) == 2, "both workers run")
        if while_training:
            wait_until(lambda: is_training(folder), "both workers train")
        workers_of(os.getpid())[rank].send_signal(number)

    with alongside(strike):
        yield


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}
