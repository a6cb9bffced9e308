"""CPU limits of nodes: quotas by control groups (version 1 or 2), and pinning to cores."""

from __future__ import annotations

import contextlib
import errno
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paceline.emulation.namespaces import program
from paceline.errors import ERROR_PREFIX, ClusterError
from paceline.measure.machine import cgroup_dirs

FULL = 1.0 + 1e-9
"""Capacity of a core, with room for rounding."""

PIN_SCRIPT = (
    f'"$1" -cp "$2" $$ > /dev/null 2>&1 || {{ echo "$3" >&2; exit {ClusterError.exit_code}; }}; '
    'shift 3; exec "$@"'
)


PERIOD_SECONDS = 0.01
"""Short, so that a used-up quota does not block a training step for long."""
MIN_QUOTA_SECONDS = 0.001
"""Minimum that the kernel accepts per period."""
MAX_PERIOD_SECONDS = 1.0

MIN_CPUS = MIN_QUOTA_SECONDS / MAX_PERIOD_SECONDS

UNLIMITED = {"cpu.max": "max", "cpu.weight": "100"}
"""Initial values of the files of an unlimited version 2 group."""

JOIN_FILE = "cgroup.procs"
SUBTREE_FILE = "cgroup.subtree_control"
JOIN_SCRIPT = 'echo $$ > "$1" && shift && exec "$@"'

RecordPlan = Callable[[dict[int, Path], Path | None], None]
"""Receives the groups by node, and the parent whose CPU controller will be enabled, if any."""


def assign_cores(
    cpus_of: Mapping[int, float], cores: Sequence[int], taken: Mapping[int, float]
) -> dict[int, list[int]]:
    """Assign cores to every node without overloading any; empty if that is impossible.

    A node of at most one cpu represents a machine with one core, and a node of two cpus one with
    two. On more cores, its threads would run in parallel, use up the quota and then all stop until
    the next period, which is too long for transfers on a fast link. `taken` is the load that other
    clusters put on the cores.
    """
    load = {core: taken.get(core, 0.0) for core in cores}
    placed: dict[int, list[int]] = {}
    for node, cpus in sorted(cpus_of.items(), key=lambda item: -item[1]):
        count = max(1, math.ceil(cpus))
        if 1 < cpus < count:
            return {}
        own = sorted(load, key=lambda each: load[each])[:count]
        for core in own:
            load[core] += cpus / count
        if len(own) < count or any(load[core] > FULL for core in own):
            return {}
        placed[node] = own
    return placed


def core_prefix(cores: Sequence[int] | None, label: str) -> list[str]:
    """Arguments that pin the command after them to these cores; None: any core.

    The command exits with an error if it may not use them. That is checked there, because the
    control group that it joins may allow other cores than the group of this process.
    """
    if not cores:
        return []
    listed = ",".join(map(str, cores))
    refusal = f"{ERROR_PREFIX}{core_refusal(cores, label)}"
    return ["sh", "-c", PIN_SCRIPT, "sh", program("taskset"), listed, refusal]


def core_refusal(cores: Sequence[int], label: str) -> str:
    """The error of a process that may not use the cores of its node."""
    return (
        f"{label} runs on core {' or '.join(map(str, cores))}, which this process may not use:"
        " remove the cluster and create it from here"
    )


def create_cgroups(
    name: str,
    cpus_of: Mapping[int, float],
    record_plan: RecordPlan = lambda planned, offering: None,
    folders: Iterable[Path] | None = None,
) -> dict[int, Path] | None:
    """Create a group with a quota for each node; None if no parent group accepts them.

    Candidate parents are the groups of this process, innermost first. `record_plan` is called
    before anything is created; `remove_groups` and `disable_cpu_controller` undo the plan.
    """
    for parent in cgroup_dirs("cpu") if folders is None else folders:
        if not (parent / JOIN_FILE).exists():
            continue
        planned = {node: parent / f"{name}-{node}" for node in cpus_of}
        offering = parent if is_version_2(parent) and not _has_cpu_controller(parent) else None
        record_plan(planned, offering)
        error = _create(planned, cpus_of, offering)
        if error is None:
            return planned
        remove_groups(planned.values())
        if offering is not None:
            disable_cpu_controller(offering)
        # Version 1 rejects a quota above the parent's own; a group further out would escape it.
        if error.errno == errno.EINVAL and not is_version_2(parent):
            break
    record_plan({}, None)
    return None


def disable_cpu_controller(parent: Path) -> None:
    """Disable the CPU controller for children, unless one of them has limits by now."""
    with contextlib.suppress(OSError):  # removed already, or in use further down
        if _has_cpu_controller(parent) and not any(map(_is_limited, parent.iterdir())):
            _write(parent / SUBTREE_FILE, "-cpu")


def is_outside_own_group(group: Path) -> bool:
    """Whether a group lies outside the group of this process, whose limits then do not apply."""
    return group.parent != next(cgroup_dirs("cpu"), None)


def set_quota(group: Path, cpus: float) -> None:
    period = round(max(PERIOD_SECONDS, MIN_QUOTA_SECONDS / cpus) * 1e6)
    quota = round(cpus * period)
    if is_version_2(group.parent):
        _write(group / "cpu.max", f"{quota} {period}")
    else:
        _write(group / "cpu.cfs_period_us", str(period))
        _write(group / "cpu.cfs_quota_us", str(quota))


def cgroup_prefix(group: Path) -> list[str]:
    """Arguments that run the command after them in the group."""
    return ["sh", "-c", JOIN_SCRIPT, "sh", str(group / JOIN_FILE)]


def pids_in(groups: Iterable[Path]) -> list[int]:
    pids: list[int] = []
    for group in groups:
        with contextlib.suppress(OSError):
            pids += map(int, (group / JOIN_FILE).read_text(encoding="ascii").split())
    return pids


def remove_groups(groups: Iterable[Path]) -> list[Path]:
    """Remove the groups that exist; returns those that could not be removed."""
    left = [group for group in groups if group.exists()]
    deadline = time.monotonic() + 1
    while left:
        for group in left:
            with contextlib.suppress(OSError):
                group.rmdir()
        left = [group for group in left if group.exists()]
        # The kernel may take a moment to notice that the last process has ended.
        if left and time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            break
    return left


def is_version_2(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _create(
    planned: Mapping[int, Path], cpus_of: Mapping[int, float], offering: Path | None
) -> OSError | None:
    """Create the groups; returns the error, if any."""
    try:
        if offering is not None:
            _write(offering / SUBTREE_FILE, "+cpu")
        for node, group in planned.items():
            remove_groups([group])
            group.mkdir()
            set_quota(group, cpus_of[node])
    except OSError as error:
        return error
    if not all(map(_can_join, list(planned.values())[:1])):
        return PermissionError(errno.EACCES, "cannot be joined")
    return None


def _has_cpu_controller(parent: Path) -> bool:
    try:
        return "cpu" in (parent / SUBTREE_FILE).read_text(encoding="ascii").split()
    except OSError:
        return False


def _is_limited(child: Path) -> bool:
    for name, unlimited in UNLIMITED.items():
        with contextlib.suppress(OSError):
            if (child / name).read_text(encoding="ascii").split()[:1] != [unlimited]:
                return True
    return False


def _can_join(group: Path) -> bool:
    """Permission to create a group does not imply permission to move processes into it."""
    return not subprocess.run([*cgroup_prefix(group), "true"], capture_output=True).returncode


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
