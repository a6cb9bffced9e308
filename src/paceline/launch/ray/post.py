"""What runs on each machine of a Ray cluster: an actor that has one process at a time.

The process is no part of Ray: it has signals, threads and standard streams of its own, as if any
other launcher had started it, and it ends at once when its actor does. The actor does one thing
after the other, in its main thread, and nothing that takes long.
"""

from __future__ import annotations

import importlib
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.launch.ports import free_port

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


class Post:
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
            [sys.executable, "-m", "paceline.launch.ray.tied", str(os.getpid()), *own],
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
