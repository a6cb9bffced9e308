"""Hardware and software of this machine, for the records and for `paceline doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from paceline.measure.gpus import describe_gpus

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def hardware() -> dict[str, Any]:
    """Return what is needed to interpret a measurement; nothing identifies the machine or owner."""
    return {
        "cpu": cpu_model(),
        "cores": cores_usable(),
        "cores_in_machine": os.cpu_count(),
        "cpu_quota": cpu_quota(),
        "memory_bytes": memory_usable_bytes(),
        "architecture": platform.machine(),
        "kernel": f"{platform.system()} {platform.release()}",
        "gpus": describe_gpus(),
    }


def software() -> dict[str, str | None]:
    """Return versions by package without importing them; None if not installed."""
    return {
        "paceline": installed_version("paceline"),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "numpy")},
    }


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores_usable() -> int:
    """Return the number of whole cores that CPU affinity and CPU quota allow this process."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # Not available on this system.
        allowed = os.cpu_count() or 1
    quota = cpu_quota()
    # A fraction of a core is not enough for another busy thread.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Return the CPU quota, in cores, of the most restrictive cgroup of this process."""
    quotas = []
    for folder in cgroup_dirs("cpu", proc, cgroups):
        quota, period = _read_integers(folder / "cpu.max", 2)
        if period is None:
            (quota,) = _read_integers(folder / "cpu.cfs_quota_us", 1)
            (period,) = _read_integers(folder / "cpu.cfs_period_us", 1)
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_usable_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the memory of the machine, or the cgroup limit of this process if it is lower."""
    limits = [psutil.virtual_memory().total]
    for folder in cgroup_dirs("memory", proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            (limit,) = _read_integers(folder / name, 1)
            if limit:
                limits.append(limit)
    return min(limits)


def cpu_model() -> str:
    try:
        for line in (PROC / "cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cgroup_dirs(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the cgroup directories that can limit this process, innermost first.

    Inside a container, the path may be that of the host, which does not exist there. Its ancestors
    that do exist, up to the mounted root, hold the limits of the container.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controllers
            if not root.is_dir():
                root = cgroups / controller
        else:
            continue
        folder = Path(path.lstrip("/"))
        for part in (folder, *folder.parents):
            if (root / part).is_dir():
                yield root / part


def _read_integers(path: Path, count: int) -> tuple[int | None, ...]:
    """Return the first fields of a file as integers; None for each that is missing or invalid."""
    try:
        fields = path.read_text(encoding="utf-8").split()[:count]
    except OSError:
        fields = []
    numbers = [int(field) if field.lstrip("-").isdigit() else None for field in fields]
    return (*numbers, *[None] * (count - len(numbers)))
