"""How workers that share memory wait for one another: look for a while, then sleep until called.

Every worker has a bell in the shared memory. Whoever has changed something that another may wait
for rings the other's bell: it writes a number there that was never there before, and if the other
sleeps, it has the kernel wake it (a futex). A worker that finds nothing to do looks at its bell for
a moment, since an answer often comes at once; then it sleeps and leaves the core to others. The
moment gets shorter with every wait that is longer than it is worth, as most are on a busy machine,
until one is not. Where workers outnumber cores it sleeps without looking.

A worker says that it sleeps before the kernel looks at its bell for the last time, and a caller
looks at that after what it wrote has left its processor; so none is missed. A sleep is short and
then repeated all the same, to see whether a peer is gone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Sequence

from paceline.comm.shm.segment import CACHE_LINE_BYTES, SharedSegment, pid_namespace

NAP_SECONDS = 0.02
MAX_SPIN_SECONDS = 1e-3
"""Long enough for the small differences between workers that compute the same: waking one that
sleeps holds up the one who calls it, by 50 to 100 us on a virtual machine."""
LEAST_LOOK_SECONDS = 3e-5

_FUTEX_NUMBERS = {"x86_64": 202}
_WAIT, _WAKE = 0, 1
"""Of futexes that processes share."""

STAMP_BITS = 32
_STAMP, _ASLEEP, _LEFT, _PROCESS, _SPACE = range(5)
"""What is on the line of a worker: its bell, and what it says about itself."""


_fence = threading.Lock()


def memory_fence() -> None:
    """Have all that was written reach the others before anything is read.

    A processor may read past its own writes, but not past the locked instruction of a lock.
    """
    with _fence:
        pass


def is_supported() -> bool:
    """Whether this machine keeps the order in which a processor writes, as x86 does."""
    return platform.system() == "Linux" and platform.machine() in _FUTEX_NUMBERS


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexSignals:
    """Those of all workers; made by each of them for itself, on `rank`'s behalf."""

    def __init__(
        self, arena: SharedSegment, begin_byte: int, rank: int, world_size: int, cores: int
    ) -> None:
        """`cores` is how many all of them have between them."""
        self._rank = rank
        self._lines = arena.integers(begin_byte, world_size * CACHE_LINE_BYTES, "I")
        self._own = rank * (CACHE_LINE_BYTES // 4)
        self._peers = [
            (peer, peer * (CACHE_LINE_BYTES // 4)) for peer in range(world_size) if peer != rank
        ]
        self._addresses = [
            arena.address(begin_byte + number * CACHE_LINE_BYTES) for number in range(world_size)
        ]
        # The first bits say who rings and the others count, so no two calls write the same number.
        counting_bits = STAMP_BITS - (world_size - 1).bit_length()
        self._stamps = rank << counting_bits
        self._most_rings = (1 << counting_bits) - 1
        self._rings = 0
        # More workers than cores: whoever looks on keeps the one it waits for from running.
        self._looks_on = world_size <= cores
        self._look_seconds = MAX_SPIN_SECONDS
        self._nap = ctypes.byref(_Timespec(0, int(NAP_SECONDS * 1e9)))
        self._futex = _system_call()
        self._number = _FUTEX_NUMBERS[platform.machine()]
        self._deaths = select.poll()
        self._descriptors: dict[int, int] = {}
        self._ended_before: list[int] = []
        """Peers whose processes had ended when this one began to watch them."""
        self._lines[self._own + _PROCESS] = os.getpid()
        self._lines[self._own + _SPACE] = pid_namespace() & 0xFFFFFFFF

    @staticmethod
    def size_bytes(world_size: int) -> int:
        return world_size * CACHE_LINE_BYTES

    def watch_over_peers(self) -> None:
        """Learn when a peer's process ends. All must have come."""
        for peer, line in self._peers:
            process = self._lines[line + _PROCESS]
            # In another container its number may be that of somebody else here.
            is_known_here = self._lines[line + _SPACE] == self._lines[self._own + _SPACE]
            if process == os.getpid() or not is_known_here:
                continue
            try:
                descriptor = os.pidfd_open(process)
            except ProcessLookupError:
                self._ended_before.append(peer)
                continue
            except (AttributeError, OSError):
                continue  # then its silence has to tell
            self._descriptors[descriptor] = peer
            self._deaths.register(descriptor, select.POLLIN)

    def notify_all(self) -> None:
        """Call all peers, after something has changed in the shared memory."""
        self._call(self._peers)

    def notify(self, peer: int) -> None:
        self._call([(peer, peer * (CACHE_LINE_BYTES // 4))])

    def _call(self, peers: Sequence[tuple[int, int]]) -> None:
        lines = self._lines
        self._rings = (self._rings + 1) & self._most_rings
        stamp = self._stamps | self._rings
        for _, line in peers:
            lines[line + _STAMP] = stamp
        memory_fence()
        for peer, line in peers:
            if lines[line + _ASLEEP]:
                self._futex(self._number, self._addresses[peer], _WAKE, 1, None)

    def wait(self, found: Callable[[], bool]) -> bool:
        """Whether `found`, which changes only with calls: look on, then sleep for a short while."""
        lines, own = self._lines, self._own
        stamp = lines[own + _STAMP]
        if found():
            return True
        began = time.perf_counter()
        if self._looks_on:
            until = began + self._look_seconds
            while time.perf_counter() < until:
                if lines[own + _STAMP] != stamp:
                    return found()
        lines[own + _ASLEEP] = 1
        try:
            self._futex(self._number, self._addresses[self._rank], _WAIT, stamp, self._nap)
        finally:
            lines[own + _ASLEEP] = 0
        is_worth_looking = time.perf_counter() - began < MAX_SPIN_SECONDS
        self._look_seconds = (
            MAX_SPIN_SECONDS
            if is_worth_looking
            else max(self._look_seconds / 2, LEAST_LOOK_SECONDS)
        )
        return found()

    def leave(self) -> None:
        """Tell the peers that nothing more will come from here."""
        self._lines[self._own + _LEFT] = 1
        self.notify_all()
        # Whoever waits on another thread sees all of them or none.
        descriptors, self._descriptors, self._deaths = self._descriptors, {}, select.poll()
        for descriptor in descriptors:
            os.close(descriptor)

    def gone(self) -> tuple[Sequence[int], Sequence[int]]:
        """Peers that have left, and peers whose processes have ended without that."""
        left = [peer for peer, line in self._peers if self._lines[line + _LEFT]]
        peers, deaths = self._descriptors, self._deaths
        # Another thread may just have closed them, which is no news of a peer.
        ended = [
            peers[each] for each, event in deaths.poll(0) if event & select.POLLIN and each in peers
        ]
        return left, [peer for peer in [*self._ended_before, *ended] if peer not in left]


def _system_call() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=False).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    )  # fmt: skip
    return call
