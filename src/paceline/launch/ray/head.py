"""Ray's head, the process that knows all of a cluster: whether it still answers.

Ray ends every program that has not reached its head for a minute, at once and in its own words, and
most questions to Ray hang until then. So it is watched from here, and a run ends before that.
"""

from __future__ import annotations

import re
import socket
from threading import Event, Thread
from time import monotonic, sleep

SILENCE_SECONDS = 12.0
"""Without an answer it is held to be lost: longer than a cable is out, and far below a minute."""
LOOK_SECONDS = 1.0
CONNECT_SECONDS = 2.0


class Head:
    """Watches a head until it is closed; one that was never reached from here is never lost."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_lost = False
        """Once it is, nothing more may be asked of Ray itself; actors still answer for a while."""
        self.lost_at = float("inf")
        self._answered = monotonic()
        self._is_closed = Event()
        # Through a proxy, Ray may know it by an address that is none here.
        self._is_watched = try_to_connect(address) is None
        self._thread = Thread(target=self._watch, name="ray head", daemon=True)
        self._thread.start()

    def answers(self) -> bool:
        """Whether it does; if it is silent now, waits until it is lost or back."""
        while self._is_watched and not self.is_lost:
            if try_to_connect(self.address) is None:
                return True
            sleep(LOOK_SECONDS)
        return not self.is_lost

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._is_watched and not self.is_lost and not self._is_closed.wait(LOOK_SECONDS):
            if try_to_connect(self.address) is None:
                self._answered = monotonic()
            elif monotonic() - self._answered > SILENCE_SECONDS:
                self.lost_at = monotonic()
                self.is_lost = True


def try_to_connect(address: str, seconds: float = CONNECT_SECONDS) -> str | None:
    """Why nothing is reached at `host:port`; None where something is, or it is no such address."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+)\]?:(\d+)", address)
    if match is None:
        return None
    try:
        socket.create_connection((match[1], int(match[2])), seconds).close()
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
