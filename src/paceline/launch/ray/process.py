"""A process on a machine of a Ray cluster, with pipes here as if it were a child of this process.

A thread carries bytes between the pipes and the machine's actor (launch/ray/post.py), so that
whoever watches over local processes and over those behind ssh can watch over these as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from time import monotonic
from typing import IO, Any

from paceline.launch.ray.cluster import cause_of, load
from paceline.launch.ray.head import Head
from paceline.launch.ray.post import PIPE_BYTES, Heard

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
        head: Head,
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
