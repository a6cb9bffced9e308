"""Threads of gloo at the end of a process.

A thread of gloo that completes a collective releases its tensors, which needs the GIL if Python has
seen them. If the interpreter is already shutting down, that ends the process with "terminate called
without an active exception".
"""

from __future__ import annotations

import time
from pathlib import Path

THREAD_NAME = "pt_gloo_runloop"
POLL_SECONDS = 0.001
TIMEOUT_SECONDS = 1.0


def wait_until_idle() -> None:
    """Wait, with a timeout, until no thread of gloo runs. Releases the GIL meanwhile."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    idle = 0
    while idle < 2 and time.monotonic() < deadline:
        if not any(each == "R" for each in _states()):
            idle += 1
        else:
            idle = 0
        time.sleep(POLL_SECONDS)


def _states() -> list[str]:
    states = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name.startswith(THREAD_NAME[:15]):
            states.append(rest.split()[0])
    return states
