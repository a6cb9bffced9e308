"""What runs on each machine of a Ray cluster: an actor that has one process at a time.

The process is no part of Ray: it has signals, threads and standard streams of its own, as if any
other launcher had started it, and it ends at once when its actor does. The actor does one thing
after the other, in its main thread, and nothing that takes long.

A process on a machine of a Ray cluster, with pipes here as if it were a child of this process.

A thread carries bytes between the pipes and the machine's actor (launch/ray/process.py), so that
whoever watches over local processes and over those behind ssh can watch over these as well."""

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
"""How long an exchange waits for something to tell."""
PIPE_BYTES = 1 << 20
"""The most that is passed on at once."""
OF_RAY = ("RAY_", "OMP_NUM_THREADS")
"""Beginnings of variables that Ray sets for its own workers, and that a process is not to get."""
PYTHON = "python of the machine"
"""As the first word of a command: the Python that the machine's Ray uses."""


class Heard(NamedTuple):
    """What an exchange brings back."""

    out: bytes
    err: bytes
    code: int | None
    """Once the process has ended and has been heard to the end."""
    is_ready: bool
    """Whether all of the words have been passed on, so that more may come."""


class NodeActor:
    """Its methods are called from afar."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._words = b""
        """On their way to the process."""

    def free_port(self, address: str) -> int:
        """On this machine, which the others reach at this address."""
        return free_port(address)

    def whereabouts(self) -> tuple[str, str]:
        """Ray's name of this machine, and the address by which the others reach it."""
        ray = importlib.import_module("ray")
        address = importlib.import_module("ray.util").get_node_ip_address()
        return str(ray.get_runtime_context().get_node_id()), str(address)

    def set_aside(self, path: str, name: str, folder: str) -> None:
        """Give a folder another name beside it, where it exists; `path` is relative to `folder`."""
        path_here = _here(folder) / path
        if path_here.is_dir() and not path_here.with_name(name).exists():
            path_here.rename(path_here.with_name(name))

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Start a command, in a folder where that exists, with variables of the starter."""
        kept = {name: text for name, text in os.environ.items() if not name.startswith(OF_RAY)}
        own = [sys.executable if word == PYTHON else word for word in words]
        self._words = b""
        self._process = subprocess.Popen(
            tied_command(signal.SIGKILL, own),
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

    def exchange(self, words: bytes, is_let_go: bool, most_bytes: int) -> Heard:
        """Pass words on to the process, and hear so much of what it says at the most.

        `is_let_go` ends its input.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise RuntimeError("nothing was started")
        self._words += words
        out, err = self._wait_for_news(process, most_bytes)
        if is_let_go and not self._words:
            process.stdin.close()
        code = process.poll() if not out and not err else None
        return Heard(out, err, code, not self._words)

    def kill(self) -> None:
        """End the process, and what it has started with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _wait_for_news(
        self, process: subprocess.Popen[bytes], most_bytes: int
    ) -> tuple[bytes, bytes]:
        heard = {"out": b"", "err": b""}
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("out", process.stdout), ("err", process.stderr)):
                if pipe is not None and not pipe.closed:
                    selector.register(pipe, selectors.EVENT_READ, name)
            if self._words and process.stdin is not None:
                selector.register(process.stdin, selectors.EVENT_WRITE, "in")
            for key, _ in selector.select(WAIT_SECONDS):
                if key.data == "in":
                    self._send(key.fd)
                else:
                    heard[key.data] = os.read(key.fd, most_bytes)
                    if not heard[key.data]:
                        # At its end it would always be ready, and nobody could wait for the other.
                        key.fileobj.close()  # type: ignore[union-attr]  # registered above
        return heard["out"], heard["err"]

    def _send(self, pipe: int) -> None:
        try:
            self._words = self._words[os.write(pipe, self._words) :]
        except BrokenPipeError:
            self._words = b""
        except BlockingIOError:
            pass


def _here(folder: str) -> Path:
    """The same folder on this machine, where there is one, and else the current one."""
    return Path(folder) if Path(folder).is_dir() else Path.cwd()


POLL_SECONDS = 0.2
KILL_SECONDS = 3.0
"""How long a machine may take to say that it has ended a process; it will end with its actor."""
LAST_WORDS_SECONDS = 15.0
"""What machines get to stop and to hand in their records when Ray's head is lost."""
HEADLESS_BYTES = 1 << 15
"""Heard at once then: of each stream, since Ray brings over 100 kB by ways that need its head."""
LOST = 255
"""The exit code of a process whose actor is gone, as ssh has it for a lost connection."""


class RayProcess:
    """As much of `subprocess.Popen` as is needed."""

    def __init__(
        self,
        post: Any,
        head: HeadMonitor,
        words: Sequence[str],
        given: bytes,
        variables: Mapping[str, str],
        folder: str,
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self.cause = ""
        """What Ray said of an actor that was lost."""
        self._post = post
        self._head = head
        self._given = given
        self._killed_at: float | None = None
        self._has_ended = Event()
        self._input, own = os.pipe()
        self.stdin: IO[bytes] = os.fdopen(own, "wb")
        theirs, self._out = os.pipe()
        self.stdout: IO[bytes] = os.fdopen(theirs, "rb")
        theirs, self._err = os.pipe()
        self.stderr: IO[bytes] = os.fdopen(theirs, "rb")
        for pipe in (self._input, self._out):
            # A user may have so much in pipes only; then they stay as small as they are.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for pipe in (self._out, self._err):
            os.set_blocking(pipe, False)
        start = (list(words), dict(variables), folder)
        self._thread = Thread(target=self._carry, args=start, name="ray process", daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self.returncode if self._has_ended.is_set() else None

    @property
    def is_lost(self) -> bool:
        """Whether it ended by no doing of its own, nor of ours."""
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
            self._post.kill.remote()

    def _carry(self, words: list[str], variables: dict[str, str], folder: str) -> None:
        ray_errors = load().exceptions.RayError
        code: int | None = None
        try:
            self._ask("start", words, variables, folder)
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
        words, is_let_go, is_ready = self._given, False, True
        while True:
            if is_ready and not is_let_go and not words:
                words, is_let_go = self._take_input()
            # Without Ray's head nobody can go on for long: a last checkpoint, while there is time.
            is_let_go = is_let_go or self._head.is_lost
            most_bytes = HEADLESS_BYTES if self._head.is_lost else PIPE_BYTES
            heard: Heard = self._ask("exchange", words, is_let_go, most_bytes)
            words, is_ready = b"", heard.is_ready
            self._put(self._out, heard.out)
            self._put(self._err, heard.err)
            if heard.code is not None:
                return heard.code

    def _take_input(self) -> tuple[bytes, bool]:
        """What was written to `stdin` since, and whether that has been closed."""
        if not select.select([self._input], [], [], 0)[0]:
            return b"", False
        words = os.read(self._input, PIPE_BYTES)
        return words, not words

    def _put(self, pipe: int, said: bytes) -> None:
        while said:
            self._check_killed()
            if select.select([], [pipe], [], POLL_SECONDS)[1]:
                try:
                    said = said[os.write(pipe, said) :]
                except BrokenPipeError:
                    return  # nobody listens any more

    def _ask(self, method: str, *arguments: Any) -> Any:
        ray = load()
        answer = getattr(self._post, method).remote(*arguments)
        while not ray.wait([answer], timeout=POLL_SECONDS)[0]:
            self._check_killed()
        return ray.get(answer)

    def _check_killed(self) -> None:
        if self._killed_at is not None and monotonic() - self._killed_at > KILL_SECONDS:
            raise _SilentError
        # Of what was lost together with the head, Ray would not tell.
        if monotonic() - self._head.lost_at > LAST_WORDS_SECONDS:
            raise _SilentError


class _SilentError(Exception):
    """The process was killed from here, or Ray's head is lost, and its machine did not answer."""
