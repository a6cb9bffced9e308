"""CPU quotas by control groups, of version 1 or 2, whichever this machine lets us use."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline.measure.machine import group_folders

PERIOD_SECONDS = 0.01
"""Short, so that a quota spreads over a training step instead of stopping it for long."""
LEAST_QUOTA_SECONDS = 0.001
"""The kernel takes no less in one period."""
LONGEST_PERIOD_SECONDS = 1.0

LEAST_CPUS = LEAST_QUOTA_SECONDS / LONGEST_PERIOD_SECONDS

JOIN_FILE = "cgroup.procs"
JOIN_SCRIPT = 'echo $$ > "$1" && shift && exec "$@"'


def make_groups(
    name: str, cpus_of: Mapping[int, float], folders: Iterable[Path] | None = None
) -> dict[int, Path] | None:
    """A group with its quota for each node; None where no place for them can be written.

    The places tried are the groups that this process is in, innermost first.
    """
    for parent in group_folders("cpu") if folders is None else folders:
        made: dict[int, Path] = {}
        try:
            _offer_cpu_to_children(parent)
            for node, cpus in cpus_of.items():
                made[node] = parent / f"{name}-{node}"
                remove_groups([made[node]])
                made[node].mkdir()
                set_quota(made[node], cpus)
            if all(map(_can_join, list(made.values())[:1])):
                return made
        except OSError:
            pass
        remove_groups(made.values())
    return None


def set_quota(group: Path, cpus: float) -> None:
    period = round(max(PERIOD_SECONDS, LEAST_QUOTA_SECONDS / cpus) * 1e6)
    quota = round(cpus * period)
    if is_version_2(group.parent):
        _write(group / "cpu.max", f"{quota} {period}")
    else:
        _write(group / "cpu.cfs_period_us", str(period))
        _write(group / "cpu.cfs_quota_us", str(quota))


def join_words(group: Path) -> list[str]:
    """Before a command's own words: it runs in the group."""
    return ["sh", "-c", JOIN_SCRIPT, "sh", str(group / JOIN_FILE)]


def pids_in(groups: Iterable[Path]) -> list[int]:
    pids: list[int] = []
    for group in groups:
        with contextlib.suppress(OSError):
            pids += map(int, (group / JOIN_FILE).read_text(encoding="ascii").split())
    return pids


def named(name: str) -> list[Path]:
    """Groups that `make_groups` made under this name, should a crash have kept them unrecorded."""
    found = (path for folder in group_folders("cpu") for path in folder.glob(f"{name}-*"))
    return [path for path in found if path.name.removeprefix(f"{name}-").isdecimal()]


def remove_groups(groups: Iterable[Path]) -> None:
    """Those without processes; a group that is gone already is fine."""
    left = [group for group in groups if group.exists()]
    deadline = time.monotonic() + 1
    while left:
        for group in left:
            with contextlib.suppress(OSError):
                group.rmdir()
        left = [group for group in left if group.exists()]
        # The kernel may take a moment to see that the last process has gone.
        if left and time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            return


def is_version_2(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _offer_cpu_to_children(parent: Path) -> None:
    if not (parent / JOIN_FILE).exists():
        raise FileNotFoundError(parent / JOIN_FILE)
    if is_version_2(parent):
        control = parent / "cgroup.subtree_control"
        if "cpu" not in control.read_text(encoding="ascii").split():
            _write(control, "+cpu")


def _can_join(group: Path) -> bool:
    """A group may be ours to make and yet not ours to move processes into."""
    return not subprocess.run([*join_words(group), "true"], capture_output=True).returncode


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
