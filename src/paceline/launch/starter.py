"""A node process's line to the command that started it, here or over ssh (launch/fleet.py).

The first line of its standard input says what to do. After that the starter sends a sign of life
every few seconds, or the name of a signal to pass on; when the input ends or falls silent, the
starter is gone or the connection is cut, and this process ends too, with all that it has started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from threading import Thread
from time import sleep
from typing import Any

from paceline.errors import PacelineError

COMPLAINT = "paceline: error: "
"""Begins the lines that tell what went wrong."""
NEWS_MARK = "\x1e"
"""Begins the lines of standard error that are for the starter and not for the user."""
BEAT_SECONDS = 2.0
"""How often the starter sends a sign of life."""
SILENCE_SECONDS = 20.0
"""Without any, the connection is held to be cut; many beats, since machines may be overloaded."""
LAST_ITERATION_SECONDS = 5.0
"""What workers get to agree on a last iteration when the starter is gone."""
CLEARING_SECONDS = 3.0
"""What a launcher gets to end its workers after that."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM)

_INPUT = 0


def read_given() -> dict[str, Any]:
    """The first line of standard input, an object of JSON; empty where nothing came."""
    # Byte by byte: what follows the line belongs to whoever reads on.
    line = bytearray()
    while (byte := os.read(_INPUT, 1)) not in (b"", b"\n"):
        line += byte
    value = json.loads(line) if line else {}
    if not isinstance(value, dict):
        raise ValueError("the first line of the input is not an object")
    return value


def tell(**news: Any) -> None:
    """Let the starter know something that the user need not see."""
    sys.stderr.write(f"{NEWS_MARK}{json.dumps(news)}\n")
    sys.stderr.flush()


def telling_errors(action: Callable[[], object]) -> int:
    """Do something; returns 0, or the exit code of an error, which is told as commands do."""
    try:
        action()
    except PacelineError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"{COMPLAINT}{line}\n")
        sys.stderr.flush()
        return error.exit_code
    return 0


def end_with_starter() -> None:
    """From now on, pass on the starter's signals, and end soon after it."""
    Thread(target=_watch, name="starter", daemon=True).start()


def _watch() -> None:
    while select.select([_INPUT], [], [], SILENCE_SECONDS)[0]:
        received = os.read(_INPUT, 4096)
        if not received:
            break
        for word in received.decode(errors="replace").split():
            for number in PASSED_ON:
                if word == number.name:
                    os.kill(os.getpid(), number)
    # A first signal lets workers finish their iteration, a second one ends them at once.
    for seconds in (LAST_ITERATION_SECONDS, CLEARING_SECONDS):
        os.kill(os.getpid(), signal.SIGTERM)
        sleep(seconds)
    # Whatever still holds this process up, its children are tied to it and end as well.
    os.kill(os.getpid(), signal.SIGKILL)
