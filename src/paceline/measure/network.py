"""Bytes over network interfaces, from /proc."""

from __future__ import annotations

import os

WAYS = ("sent", "received")


class NetworkCounter:
    """Bytes over the interfaces of the network namespace that a process lives in, since the start.

    The file stays open, so the namespace can still be read when that process has ended.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._file = os.open(f"/proc/{pid}/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        self._last = self._read()
        self._totals = dict.fromkeys(
            (f"{kind}_bytes_{way}" for kind in ("network", "loopback") for way in WAYS), 0
        )

    def totals(self) -> dict[str, int]:
        """All interfaces together (`network_`), and the part of it that is loopback's."""
        current = self._read()
        for name, counts in current.items():
            before = self._last.get(name, (0, 0))
            for way, count, old in zip(WAYS, counts, before, strict=True):
                # An interface that was taken away and made anew counts from zero again.
                grown = count - old if count >= old else count
                self._totals[f"network_bytes_{way}"] += grown
                if name == "lo":
                    self._totals[f"loopback_bytes_{way}"] += grown
        self._last = current
        return dict(self._totals)

    def _read(self) -> dict[str, tuple[int, int]]:
        counts = {}
        for line in os.pread(self._file, 1 << 20, 0).decode().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            fields = numbers.split()
            counts[name.strip()] = (int(fields[8]), int(fields[0]))
        return counts
