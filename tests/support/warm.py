"""Programs that start quickly, since they are forked from a process that has imported torch.

Importing torch takes four seconds of CPU time, and the tests of launching start dozens of programs.
A starter is a process that has imported everything and computed nothing. For each request it forks
a process that runs `python -m MODULE ...` with the arguments, environment, current folder, standard
files and parent that `subprocess` would have given it. Some tests start commands cold, to test that
as well.

    with PrewarmedStarter.opened() as starter:
        process = starter.start(["-m", "paceline", "train"], stdout=subprocess.PIPE)

A program that launches workers has its own starter for them. With `warm_spawning`, the launcher in
this process starts its workers from a starter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from paceline.launch import processes

PRELOADED = (
    "paceline.launch.worker",
    "paceline.launch.parameter_servers",
    "paceline.launch.launcher",
    "paceline.report.summary",
    "paceline.strategies.gradient_averaging",
    "torch._dynamo",
)
"""Modules that commands and workers import, and whose import starts no thread."""

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 20
ADOPTION_SECONDS = 20.0

_libc = ctypes.CDLL(None)


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
    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[PrewarmedStarter]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            try:
                yield cls(ours)
            finally:
                ours.close()
                process.wait()

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | None = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        name: str = "warm",
    ) -> WarmProcess:
        """Run `python ARGUMENTS`, which begin with -m; `name` is the process name in ps."""
        assert arguments[0] == "-m"
        assert stdin in (None, subprocess.DEVNULL)
        request = {
            "module": arguments[1],
            "arguments": list(arguments[2:]),
            "environment": dict(os.environ if env is None else env),
            "folder": str(Path.cwd() if cwd is None else cwd),
            "parent": os.getpid(),
            "has_session": start_new_session,
            "name": name,
        }
        with contextlib.ExitStack() as stack:
            out, out_end = _standard_file(stdout, 1, stack)
            err, err_end = _standard_file(stderr, 2, stack)
            with self._lock, _adopting_orphans():
                socket.send_fds(self._pipe, [json.dumps(request).encode()], [out, err])
                pid = int(self._pipe.recv(64))
        return WarmProcess(pid, arguments, out_end, err_end)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make orphaned descendants children of this process."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


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
    """Let the launcher in this process start workers and servers from a starter."""
    before = vars(processes)["subprocess"]
    _spawn_from(starter)
    try:
        yield
    finally:
        vars(processes)["subprocess"] = before


def _spawn_from(starter: PrewarmedStarter) -> None:
    def popen(command: Sequence[str], **keywords: Any) -> WarmProcess:
        assert command[0] == sys.executable
        role, rank = command[4], keywords["env"]["RANK"]
        return starter.start(command[1:], name=f"{role} {rank}", **keywords)

    vars(processes)["subprocess"] = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)


def _serve(pipe: socket.socket) -> dict[str, Any]:
    """Fork a child per request until the pipe closes; return the request in each child."""
    while True:
        message, files, _, _ = socket.recv_fds(pipe, MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        pid = _fork_orphan()
        if pid == 0:
            pipe.close()
            request: dict[str, Any] = json.loads(message)
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            return request
        for file in files:
            os.close(file)
        pipe.send(str(pid).encode())


def _fork_orphan() -> int:
    """Fork a child that becomes an orphan, so that the nearest subreaper adopts it."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return 0
    os.close(writer)
    child = int(os.read(reader, 64))
    os.close(reader)
    os.waitpid(between, 0)
    return child


def _become(request: dict[str, Any]) -> None:
    deadline = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    if request["has_session"]:
        os.setsid()
    _libc.prctl(PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # The first entry is the folder of this script.
    sys.path[:1] = [request["folder"], *(path for path in searched if path)]
    sys.argv[:] = [request["module"], *request["arguments"]]


def _open_own_starter() -> None:
    """Fork a starter for the workers of this program, before it does anything else."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        _run(_serve(theirs))
    theirs.close()
    _spawn_from(PrewarmedStarter(ours))


def _run(request: dict[str, Any]) -> None:
    _become(request)
    if request["module"] == "paceline":
        _open_own_starter()
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    for module in PRELOADED:
        __import__(module)
    _run(_serve(socket.socket(fileno=int(sys.argv[1]))))
