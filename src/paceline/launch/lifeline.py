"""A worker process must not outlive its launcher, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, sent: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process when its parent, the process `parent`, ends; on Linux.

    `sent` may be a gentler signal, for a process that will end by it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, sent, 0, 0, 0)
    # The parent may have ended before the kernel was asked.
    if os.getppid() != parent:
        os._exit(1)
