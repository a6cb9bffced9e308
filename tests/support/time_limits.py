"""A time limit for calls that could block forever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGALRM, alarm, signal
from types import FrameType


class OverLimit(BaseException):
    """Not an Exception, so that no handler in the code under test catches it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise OverLimit in a block that is stuck in a system call."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise OverLimit

    before = signal(SIGALRM, expire)
    alarm(seconds)
    try:
        yield
    finally:
        alarm(0)
        signal(SIGALRM, before)
