"""Threads that Python does not know, like those of a library."""

from __future__ import annotations

import ctypes


def start_native_thread() -> None:
    """Start a thread that sleeps for as long as this process runs."""
    libc = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.sleep, ctypes.c_void_p), 60)
