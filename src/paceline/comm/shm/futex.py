"""Signals between ranks that share memory: spin briefly, then sleep until notified.

Every rank has a cache line in shared memory with a futex word. After a rank changes data that
another rank may be waiting for, it writes a new value to that rank's futex word and, if that rank
is asleep, wakes it with a futex system call. A waiting rank first spins on its futex word, because
a response often arrives immediately; then it sleeps and yields the core. The spin time is halved
after every wait that outlasts `MAX_SPIN_SECONDS`, as most do on a busy machine, and reset after a
shorter one. If there are more ranks than cores, ranks do not spin.

No notification is lost: a rank marks itself as asleep before the kernel compares its futex word for
the last time, and a notifier reads that mark after a fence that follows its writes. Sleeps are
nevertheless short, to detect peers that have exited.
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

SLEEP_SECONDS = 0.02
MAX_SPIN_SECONDS = 1e-3
"""Longer than the usual skew between ranks that do the same work. Waking a sleeping rank blocks its
notifier for 50 to 100 us on a virtual machine."""
MIN_SPIN_SECONDS = 3e-5

_FUTEX_SYSCALLS = {"x86_64": 202}
"""The system call number for each machine type."""
_WAIT, _WAKE = 0, 1
"""FUTEX_WAIT and FUTEX_WAKE for futexes shared between processes."""

FUTEX_WORD_BITS = 32
_WORD, _ASLEEP, _DISCONNECTED, _PID, _PID_NAMESPACE = range(5)
"""Indices of the integers in a rank's cache line."""
_INTEGERS_PER_LINE = CACHE_LINE_BYTES // 4


_fence = threading.Lock()


def memory_fence() -> None:
    """Make all writes visible to other ranks before any later read.

    x86 may reorder a load before an earlier store, but not across a locked instruction.
    """
    with _fence:
        pass


def is_supported() -> bool:
    """Return whether this machine runs Linux on x86-64, which preserves the order of writes."""
    return platform.system() == "Linux" and platform.machine() in _FUTEX_SYSCALLS


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexSignals:
    """The signals of all ranks, as seen by `rank`."""

    def __init__(
        self, segment: SharedSegment, begin_byte: int, rank: int, world_size: int, cores: int
    ) -> None:
        """`cores` is the total number of cores available to all ranks."""
        self._rank = rank
        self._lines = segment.integers(begin_byte, world_size * CACHE_LINE_BYTES, "I")
        self._own = rank * _INTEGERS_PER_LINE
        self._peers = [
            (peer, peer * _INTEGERS_PER_LINE) for peer in range(world_size) if peer != rank
        ]
        self._addresses = [
            segment.address(begin_byte + each * CACHE_LINE_BYTES) for each in range(world_size)
        ]
        # The high bits identify the notifier and the low bits are its counter, so values from
        # different ranks never collide.
        counter_bits = FUTEX_WORD_BITS - (world_size - 1).bit_length()
        self._word_base = rank << counter_bits
        self._max_count = (1 << counter_bits) - 1
        self._count = 0
        # With more ranks than cores, a spinning rank blocks the rank that it waits for.
        self._spins = world_size <= cores
        self._spin_seconds = MAX_SPIN_SECONDS
        self._sleep_time = ctypes.byref(_Timespec(0, int(SLEEP_SECONDS * 1e9)))
        self._syscall = _syscall()
        self._futex = _FUTEX_SYSCALLS[platform.machine()]
        self._exits = select.poll()
        self._descriptors: dict[int, int] = {}
        """Peers by the pidfd of their process."""
        self._exited_before: list[int] = []
        """Peers whose processes had exited before `watch_peers`."""
        self._lines[self._own + _PID] = os.getpid()
        self._lines[self._own + _PID_NAMESPACE] = pid_namespace() & 0xFFFFFFFF

    @staticmethod
    def size_bytes(world_size: int) -> int:
        return world_size * CACHE_LINE_BYTES

    def watch_peers(self) -> None:
        """Start detecting the exit of peer processes.

        Call this after all ranks have written their PIDs.
        """
        for peer, line in self._peers:
            process = self._lines[line + _PID]
            # The PID of a peer in another PID namespace may belong to a different process here.
            is_same_namespace = (
                self._lines[line + _PID_NAMESPACE] == self._lines[self._own + _PID_NAMESPACE]
            )
            if process == os.getpid() or not is_same_namespace:
                continue
            try:
                descriptor = os.pidfd_open(process)
            except ProcessLookupError:
                self._exited_before.append(peer)
                continue
            except (AttributeError, OSError):
                continue  # Only the timeout detects its exit.
            self._descriptors[descriptor] = peer
            self._exits.register(descriptor, select.POLLIN)

    def notify_all(self) -> None:
        """Wake all peers after a change in shared memory."""
        self._notify(self._peers)

    def notify(self, peer: int) -> None:
        """Wake one peer after a change in shared memory."""
        self._notify([(peer, peer * _INTEGERS_PER_LINE)])

    def _notify(self, peers: Sequence[tuple[int, int]]) -> None:
        lines = self._lines
        self._count = (self._count + 1) & self._max_count
        word = self._word_base | self._count
        for _, line in peers:
            lines[line + _WORD] = word
        memory_fence()
        for peer, line in peers:
            if lines[line + _ASLEEP]:
                self._syscall(self._futex, self._addresses[peer], _WAKE, 1, None)

    def wait(self, condition: Callable[[], bool]) -> bool:
        """Wait briefly until `condition()` is true and return its last value.

        The condition may only change when a peer notifies this rank.
        """
        lines, own = self._lines, self._own
        word = lines[own + _WORD]
        if condition():
            return True
        began = time.perf_counter()
        if self._spins:
            until = began + self._spin_seconds
            while time.perf_counter() < until:
                if lines[own + _WORD] != word:
                    return condition()
        lines[own + _ASLEEP] = 1
        try:
            self._syscall(self._futex, self._addresses[self._rank], _WAIT, word, self._sleep_time)
        finally:
            lines[own + _ASLEEP] = 0
        is_worth_spinning = time.perf_counter() - began < MAX_SPIN_SECONDS
        self._spin_seconds = (
            MAX_SPIN_SECONDS if is_worth_spinning else max(self._spin_seconds / 2, MIN_SPIN_SECONDS)
        )
        return condition()

    def disconnect(self) -> None:
        """Notify all peers that this rank has disconnected."""
        self._lines[self._own + _DISCONNECTED] = 1
        self.notify_all()
        # A waiting thread sees either all descriptors or none.
        descriptors, self._descriptors, self._exits = self._descriptors, {}, select.poll()
        for descriptor in descriptors:
            os.close(descriptor)

    @property
    def have_all_disconnected(self) -> bool:
        """Whether all peers have disconnected."""
        return all(self._lines[line + _DISCONNECTED] for _, line in self._peers)

    def disconnected_and_exited_peers(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the peers that disconnected, and those whose processes exited without doing so."""
        disconnected = [peer for peer, line in self._peers if self._lines[line + _DISCONNECTED]]
        peers, exits = self._descriptors, self._exits
        # Another thread may have just closed the descriptors, which does not mean that a peer
        # exited.
        exited = [
            peers[each] for each, event in exits.poll(0) if event & select.POLLIN and each in peers
        ]
        return disconnected, [
            peer for peer in [*self._exited_before, *exited] if peer not in disconnected
        ]


def _syscall() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=False).syscall
    call.restype = ctypes.c_long
    call.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p,
    )  # fmt: skip
    return call
