"""A process on a machine of a Ray cluster: the actor that runs it, and a proxy like Popen.

The process is not part of Ray: it has its own signals, threads and standard streams, as if another
launcher had started it, and it ends with its actor. `NodeActor` runs one process at a time; its
methods run in its main thread and return quickly. `RayProcess` has pipes like a local process, and
a thread copies bytes between them and the actor, so that launch/remote/ supervises it like a
process behind ssh.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import IO, Any, NamedTuple

from paceline.child_process import tied_command
from paceline.launch.environment import free_port
from paceline.launch.ray.cluster import HeadMonitor, cause_of, load

WAIT_SECONDS = 0.25
"""How long an exchange waits for output."""
PIPE_BYTES = 1 << 20
"""Maximum bytes per exchange."""
RAY_VARIABLES = ("RAY_", "OMP_NUM_THREADS")
"""Prefixes of variables that Ray sets for its own workers and that processes do not inherit."""
PYTHON = "python of the machine"
"""Placeholder in a command for the Python that the machine's Ray uses."""


class Exchange(NamedTuple):
    """The result of one exchange with the process."""

    out: bytes
    err: bytes
    code: int | None
    """The exit code, once the process has ended and its output was read."""
    is_ready: bool
    """Whether all input was written, so that more can be sent."""


class NodeActor:
    """A Ray actor; its methods are called remotely."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._input = b""
        """Input that the process has not read yet."""

    def free_port(self, address: str) -> int:
        """A free TCP port of this machine, for an address of this family."""
        return free_port(address)

    def node_info(self) -> tuple[str, str]:
        """Ray's id of this machine, and its address for the others."""
        ray = importlib.import_module("ray")
        address = importlib.import_module("ray.util").get_node_ip_address()
        return str(ray.get_runtime_context().get_node_id()), str(address)

    def set_aside(self, path: str, name: str, folder: str) -> None:
        """Rename a folder if it exists; `path` is relative to `folder`."""
        path_here = _here(folder) / path
        if path_here.is_dir() and not path_here.with_name(name).exists():
            path_here.rename(path_here.with_name(name))

    def start(self, argv: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Start a command in a folder, if that exists, with these environment variables."""
        kept = {
            name: text for name, text in os.environ.items() if not name.startswith(RAY_VARIABLES)
        }
        command = [sys.executable if word == PYTHON else word for word in argv]
        self._input = b""
        self._process = subprocess.Popen(
            tied_command(signal.SIGKILL, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pipesize=PIPE_BYTES,
            env={**kept, **variables},
            cwd=_here(folder),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def exchange(self, data: bytes, closes_input: bool, max_bytes: int) -> Exchange:
        """Write data to the process, and read at most `max_bytes` of each output stream.

        `closes_input` closes its input once all data is written.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise RuntimeError("nothing was started")
        self._input += data
        out, err = self._transfer(process, max_bytes)
        if closes_input and not self._input:
            process.stdin.close()
        code = process.poll() if not out and not err else None
        return Exchange(out, err, code, not self._input)

    def kill(self) -> None:
        """Kill the process, and its children with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _transfer(self, process: subprocess.Popen[bytes], max_bytes: int) -> tuple[bytes, bytes]:
        output = {"out": b"", "err": b""}
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("out", process.stdout), ("err", process.stderr)):
                if pipe is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, name)
            if self._input and process.stdin is not None:
                selector.register(process.stdin, selectors.EVENT_WRITE, "in")
            for key, _ in selector.select(WAIT_SECONDS):
                if key.data == "in":
                    self._write_input(key.fd)
                else:
                    output[key.data] = os.read(key.fd, max_bytes)
                    if not output[key.data]:
                        # At its end it is always ready, and select would not wait for the other.
                        key.fileobj.close()  # type: ignore[union-attr]  # registered above
        return output["out"], output["err"]

    def _write_input(self, pipe: int) -> None:
        try:
            self._input = self._input[os.write(pipe, self._input) :]
        except BrokenPipeError:
            self._input = b""
        except BlockingIOError:
            pass


def _here(folder: str) -> Path:
    """The same folder on this machine if it exists, otherwise the current one."""
    return Path(folder) if Path(folder).is_dir() else Path.cwd()


POLL_SECONDS = 0.2
KILL_SECONDS = 3.0
"""How long a machine may take to confirm a kill; the process ends with its actor anyway."""
HEADLESS_SECONDS = 15.0
"""Time for machines to stop and send their records when Ray's head is lost."""
HEADLESS_BYTES = 1 << 15
"""Maximum bytes per exchange then: Ray needs its head to transfer more than 100 kB."""
LOST = 255
"""The exit code of a process whose actor is gone, like that of ssh for a lost connection."""


class RayProcess:
    """The part of `subprocess.Popen` that launch/remote/ uses."""

    def __init__(
        self,
        actor: Any,
        head: HeadMonitor,
        argv: Sequence[str],
        request: bytes,
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        self.args = argv
        self.returncode: int | None = None
        self.cause = ""
        """Ray's message about a lost actor."""
        self._actor = actor
        self._head = head
        self._request = request
        self._killed_at: float | None = None
        self._has_ended = Event()
        self._input, own = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(own, "wb")
        theirs, self._out = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(theirs, "rb")
        theirs, self._err = os.pipe()
        self.stderr: IO[bytes] = os.fdopen(theirs, "rb")
        for pipe in (self._input, self._out):
            # The system limits pipe memory per user; then they keep their size.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for pipe in (self._out, self._err):
            os.set_blocking(pipe, False)
        start = (list(argv), dict(variables), folder)
        self._thread = Thread(target=self._run, args=start, name="ray process", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self.returncode if self._has_ended.is_set() else None

    @property
    def is_lost(self) -> bool:
        """Whether it was lost or killed, but not by this process."""
        code = self.poll()
        return code == LOST or (code is not None and code < 0 and self._killed_at is None)

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self._thread.join()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self._killed_at is None and not self._has_ended.is_set():
            self._killed_at = monotonic()
            self._actor.kill.remote()

    def _run(self, argv: list[str], variables: dict[str, str], folder: str) -> None:
        ray_errors = load().exceptions.RayError
        code: int | None = None
        try:
            self._ask("start", argv, variables, folder)
            code = self._exchange()
        except _SilentError:
            code, self.cause = LOST, "no answer"
        except ray_errors as error:
            code, self.cause = LOST, cause_of(error)
        finally:
            self.returncode = LOST if code is None else code
            for pipe in (self._input, self._out, self._err):
                os.close(pipe)
            self._has_ended.set()

    def _exchange(self) -> int:
        data, closes_input, is_ready = self._request, False, True
        while True:
            if is_ready and not closes_input and not data:
                data, closes_input = self._read_input()
            # Without Ray's head the run cannot last: a last checkpoint, while there is time.
            closes_input = closes_input or self._head.is_lost
            max_bytes = HEADLESS_BYTES if self._head.is_lost else PIPE_BYTES
            exchange: Exchange = self._ask("exchange", data, closes_input, max_bytes)
            data, is_ready = b"", exchange.is_ready
            self._put(self._out, exchange.out)
            self._put(self._err, exchange.err)
            if exchange.code is not None:
                return exchange.code

    def _read_input(self) -> tuple[bytes, bool]:
        """New data of `stdin`, and whether it was closed."""
        if not select.select([self._input], [], [], 0)[0]:
            return b"", False
        data = os.read(self._input, PIPE_BYTES)
        return data, not data

    def _put(self, pipe: int, data: bytes) -> None:
        while data:
            self._check_killed()
            if select.select([], [pipe], [], POLL_SECONDS)[1]:
                try:
                    data = data[os.write(pipe, data) :]
                except BrokenPipeError:
                    return  # the reader is gone

    def _ask(self, method: str, *arguments: Any) -> Any:
        ray = load()
        answer = getattr(self._actor, method).remote(*arguments)
        while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
            self._check_killed()
        return ray.get(answer)

    def _check_killed(self) -> None:
        if self._killed_at is not None and monotonic() - self._killed_at > KILL_SECONDS:
            raise _SilentError
        # Ray does not report what was lost together with its head.
        if monotonic() - self._head.lost_at > HEADLESS_SECONDS:
            raise _SilentError


class _SilentError(Exception):
    """The machine does not answer after a kill, or after Ray's head was lost."""
