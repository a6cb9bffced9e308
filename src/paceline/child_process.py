"""Processes: children find this package and do not outlive their parent; any can end quickly.

`python -m paceline.child_process PARENT SIGNAL COMMAND...` replaces itself by a command that gets
the signal when the process PARENT ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn

PACKAGE_PARENT = Path(__file__).parents[1]
PR_SET_PDEATHSIG = 1


def pythonpath() -> str:
    """Return a PYTHONPATH with which a child process finds this package and user code."""
    return os.pathsep.join(filter(None, (str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", ""))))


def set_parent_death_signal(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """End this process with its parent, the process `parent`. Linux only.

    A gentler signal than the default is for a process that ends by it.
    """
    set_parent_death_signal(number)
    # The parent may have ended before the call.
    if os.getppid() != parent:
        os._exit(1)


def exit_quickly(code: int, *, joins_threads: bool = True) -> NoReturn:
    """End this process like `sys.exit`, but without taking the interpreter down.

    That takes up to half a second once torch is imported, and gloo's threads may block it. A
    process whose threads may wait in vain for others does not join them.
    """
    with contextlib.suppress(Exception):
        if joins_threads:
            threading._shutdown()  # type: ignore[attr-defined]  # as at any exit
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)


def tied_command(number: signal.Signals, command: list[str]) -> list[str]:
    """Wrap a command so that it gets the signal when this process ends."""
    entry = [sys.executable, "-m", "paceline.child_process"]
    return [*entry, str(os.getpid()), number.name, *command]


def main(arguments: list[str]) -> None:
    parent, signal_name, *command = arguments
    die_with_parent(int(parent), signal.Signals[signal_name])
    # Ray's actors block SIGINT, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The setting belongs to the process, so it outlasts exec.
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
