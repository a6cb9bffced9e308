"""Programs that start quickly, since they are forked from a process that has imported torch.

Importing torch takes four seconds of CPU time, and the tests of launching start dozens of programs.
A starter is a fork server (launch/fork_server.py). Some tests start commands cold, to test that as
well.

    with PrewarmedStarter.opened() as starter:
        process = starter.start(["-m", "paceline", "train"], stdout=subprocess.PIPE)

With `warm_spawning`, the launcher in this process starts its workers from a starter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from paceline.launch import processes
from paceline.launch.fork_server import ChildProcess, ForkServer, start_python


class WarmProcess(subprocess.Popen[Any]):
    """A child process that a starter has forked."""

    def __init__(self, pid: int, args: Sequence[str], out: IO[Any] | None, err: IO[Any] | None):
        self.pid = pid
        self.args = args
        self.stdin, self.stdout, self.stderr = None, out, err
        self.returncode = None
        self._child_created = True
        self._communication_started = False
        self._input = None
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25
        self.encoding, self.errors, self.text_mode = "utf-8", None, True


class PrewarmedStarter:
    def __init__(self, fork_server: ForkServer) -> None:
        self.fork_server = fork_server

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[PrewarmedStarter]:
        server = ForkServer.spawn()
        assert server is not None
        with server:
            yield cls(server)

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> WarmProcess:
        """Run `python ARGUMENTS`, which begin with -m."""
        assert stdin == subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            null = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, null)
            out, out_end = _standard_file(stdout, 1, stack)
            err, err_end = _standard_file(stderr, 2, stack)
            pid = self.fork_server.start(
                arguments,
                name="warm",
                environment=os.environ if env is None else env,
                folder=Path.cwd() if cwd is None else Path(cwd),
                death_signal=None,
                files=[null, out, err],
            )
        return WarmProcess(pid, arguments, out_end, err_end)


def _standard_file(
    requested: Any, inherited: int, stack: contextlib.ExitStack
) -> tuple[int, IO[str] | None]:
    """Return the file to pass to the child, and our end of it if it is a pipe."""
    if requested is None:
        return inherited, None
    if requested != subprocess.PIPE:
        return requested if isinstance(requested, int) else requested.fileno(), None
    ours, theirs = os.pipe()
    stack.callback(os.close, theirs)
    return theirs, os.fdopen(ours, encoding="utf-8")


@contextlib.contextmanager
def warm_spawning(starter: PrewarmedStarter) -> Iterator[None]:
    """Let the launcher in this process, which has threads, start workers from a starter."""

    def start(
        fork_server: ForkServer | None, arguments: Sequence[str], **keywords: Any
    ) -> ChildProcess:
        return start_python(fork_server or starter.fork_server, arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_python", start)
        yield
