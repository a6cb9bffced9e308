"""Facts about this machine and its software, for the records and for `paceline doctor`."""

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
    """What a reader needs to judge a figure; nothing that names the machine or its owner."""
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
    """Versions by name, without importing anything; None for what is not installed."""
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
    """Whole cores that this process may keep busy: its affinity and its CPU quota considered."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # Not on this system.
        allowed = os.cpu_count() or 1
    quota = cpu_quota()
    # A fraction of a core more is no place for another busy thread.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores' worth of CPU time that the tightest of this process's control groups allows it."""
    quotas = []
    for folder in cgroup_dirs("cpu", proc, cgroups):
        quota, period = _words(folder / "cpu.max", 2)
        if period is None:
            (quota,) = _words(folder / "cpu.cfs_quota_us", 1)
            (period,) = _words(folder / "cpu.cfs_period_us", 1)
        if quota is not None and quota > 0 and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_usable_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory of the machine, or what this process's control groups allow of it."""
    limits = [psutil.virtual_memory().total]
    for folder in cgroup_dirs("memory", proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            (limit,) = _words(folder / name, 1)
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
    """The folders of this process's control groups that can limit it, innermost first.

    Inside a container the path may be the host's, which does not exist there; those folders of it
    that do exist, up to the mounted root, hold the container's own limits.
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


def _words(path: Path, count: int) -> tuple[int | None, ...]:
    """The first words of a file as numbers; None for each that is missing or is no number."""
    try:
        words = path.read_text(encoding="utf-8").split()[:count]
    except OSError:
        words = []
    numbers = [int(word) if word.lstrip("-").isdigit() else None for word in words]
    return (*numbers, *[None] * (count - len(numbers)))
