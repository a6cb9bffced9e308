"""What watchers are sent, and when: the list whenever it changes, a run as it grows.

Lines of server-sent events. A stream ends when its run does, or when the server is to end: nobody
is kept waiting by a page that somebody left open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

from starlette.concurrency import run_in_threadpool

from paceline.ui.library import Library
from paceline.ui.live import Follower

LIST_SECONDS = 1.0
RUN_SECONDS = 0.4
"""How often records are looked at while somebody watches."""
IDLE_TIMES = 20
"""Looking takes at most one part in so many of a core, which the runs may need."""
KEEP_ALIVE_SECONDS = 15.0
CLOSING_SECONDS = 0.2
"""How often a stream asks whether the server is to end."""

IsClosing = Callable[[], bool]


async def list_changes(library: Library, is_closing: IsClosing) -> AsyncIterator[str]:
    pulse = _Pulse(LIST_SECONDS, is_closing)
    before = ""
    while True:
        begin = monotonic()
        entries = await run_in_threadpool(library.entries)
        spent = monotonic() - begin
        now = json.dumps([entry.to_dict() for entry in entries])
        for line in pulse.lines(now if now != before else None):
            yield line
        before = now
        if not await pulse.wait(spent):
            return


async def run_changes(follower: Follower, is_closing: IsClosing) -> AsyncIterator[str]:
    pulse = _Pulse(RUN_SECONDS, is_closing)
    while True:
        # Asked before the last look, so that nothing written in between is missed.
        is_over = follower.is_over
        begin = monotonic()
        news = await run_in_threadpool(follower.news)
        spent = monotonic() - begin
        for line in pulse.lines(None if news is None else json.dumps(news)):
            yield line
        if follower.is_behind:
            continue
        if is_over:
            yield f"event: over\ndata: {json.dumps(follower.outcome())}\n\n"
            return
        if not await pulse.wait(spent):
            return


class _Pulse:
    """Waits between two looks, and says now and then that it is still there."""

    def __init__(self, seconds: float, is_closing: IsClosing) -> None:
        self._seconds = seconds
        self._is_closing = is_closing
        self._said = monotonic()

    def lines(self, data: Any) -> list[str]:
        if data is None and monotonic() - self._said < KEEP_ALIVE_SECONDS:
            return []
        self._said = monotonic()
        return [": still here\n\n" if data is None else f"data: {data}\n\n"]

    async def wait(self, looking_seconds: float) -> bool:
        """False as soon as the server is to end."""
        until = monotonic() + max(self._seconds, IDLE_TIMES * looking_seconds)
        while not self._is_closing():
            left = until - monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, CLOSING_SECONDS))
        return False
