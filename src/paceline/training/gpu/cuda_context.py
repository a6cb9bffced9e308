"""Create a GPU's CUDA context in a thread, beside the rest of the startup.

A process needs it for any work on the GPU, and creating it takes longer than reading most datasets.
The thread calls the driver directly, so it can start before torch is imported. torch then uses the
same context; a call that needs it earlier waits in the driver.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

DRIVER = "libcuda.so.1"


def create_in_background(local_rank: int = 0) -> threading.Thread | None:
    """Start to create the context of a local rank's GPU; None if there is no CUDA driver.

    Forks of this process cannot use CUDA afterwards.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    thread = threading.Thread(
        target=_create, args=(driver, local_rank), name="CUDA context", daemon=True
    )
    thread.start()
    return thread


def _create(driver: Any, local_rank: int) -> None:
    """Create the context; if a call fails, torch reports the cause when it needs the context."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return
    # ctypes releases the interpreter lock, so imports and reading go on meanwhile.
    driver.cuDeviceGet(ctypes.byref(device), local_rank % count.value)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
