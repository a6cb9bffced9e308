"""Which of the machine's cores a node may run on.

CPU quotas by control groups, of version 1 or 2, whichever this machine lets us use."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from paceline.emulation.namespaces import program
from paceline.errors import ClusterError
from paceline.measure.machine import cgroup_dirs

FULL = 1.0 + 1e-9
"""Of a core, with room for rounding."""

HOLD_SCRIPT = (
    f'"$1" -cp "$2" $$ > /dev/null 2>&1 || {{ echo "$3" >&2; exit {ClusterError.exit_code}; }}; '
    'shift 3; exec "$@"'
)


def core_each(
    cpus_of: Mapping[int, float], cores: Sequence[int], taken: Mapping[int, float]
) -> dict[int, list[int]]:
    """A core for every node, such that none has more to do than it can; else nothing.

    A node of at most one cpu stands for a machine with one core. Were it on several, the kernel
    would deal its quota out to them in pieces: its threads would run side by side for a moment, and
    then all stop until the next period, too long for what is on a fast link to wait.
    `taken` is what other clusters have taken of the cores.
    """
    load = {core: taken.get(core, 0.0) for core in cores}
    placed: dict[int, list[int]] = {}
    for node, cpus in sorted(cpus_of.items(), key=lambda item: -item[1]):
        core = min(load, key=lambda each: load[each])
        load[core] += cpus
        if load[core] > FULL:
            return {}
        placed[node] = [core]
    return placed


def words_on(cores: Sequence[int] | None, who: str) -> list[str]:
    """Before a command's own words: it runs on these cores; None: on any.

    Where it may not, it says so and ends. That is found out there, since a control group that it
    joins may allow other cores than this process's own does.
    """
    if not cores:
        return []
    listed = ",".join(map(str, cores))
    refusal = (
        f"paceline: error: {who} runs on core {' or '.join(map(str, cores))}, which commands from"
        " here may not use: take the cluster down, and make it from here"
    )
    return ["sh", "-c", HOLD_SCRIPT, "sh", program("taskset"), listed, refusal]


PERIOD_SECONDS = 0.01
"""Short, so that a quota spreads over a training step instead of stopping it for long."""
LEAST_QUOTA_SECONDS = 0.001
"""The kernel takes no less in one period."""
LONGEST_PERIOD_SECONDS = 1.0

LEAST_CPUS = LEAST_QUOTA_SECONDS / LONGEST_PERIOD_SECONDS

UNLIMITED = {"cpu.max": "max", "cpu.weight": "100"}
"""How the files of a group of version 2 begin that nobody has set."""

JOIN_FILE = "cgroup.procs"
OFFER_FILE = "cgroup.subtree_control"
JOIN_SCRIPT = 'echo $$ > "$1" && shift && exec "$@"'

Note = Callable[[dict[int, Path], Path | None], None]
"""Is told the groups by node, and the parent that is to offer its children the CPU controller."""


def create_cgroups(
    name: str,
    cpus_of: Mapping[int, float],
    note: Note = lambda planned, offering: None,
    folders: Iterable[Path] | None = None,
) -> dict[int, Path] | None:
    """A group with its quota for each node; None where no place takes them.

    The places tried are the groups that this process is in, innermost first. Before anything is
    made at one of them, `note` is told what will be; `remove_groups` and `withdraw_cpu` undo it.
    """
    for parent in cgroup_dirs("cpu") if folders is None else folders:
        if not (parent / JOIN_FILE).exists():
            continue
        planned = {node: parent / f"{name}-{node}" for node in cpus_of}
        offering = parent if is_version_2(parent) and not _offers_cpu(parent) else None
        note(planned, offering)
        refusal = _make(planned, cpus_of, offering)
        if refusal is None:
            return planned
        remove_groups(planned.values())
        if offering is not None:
            withdraw_cpu(offering)
        # In version 1, a quota over what the group itself may use: outside of it would be escape.
        if refusal.errno == errno.EINVAL and not is_version_2(parent):
            break
    note({}, None)
    return None


def withdraw_cpu(parent: Path) -> None:
    """Offer the CPU controller no longer, unless a child has limits of its own by now."""
    with contextlib.suppress(OSError):  # gone; or in use further down, where the kernel refuses
        if _offers_cpu(parent) and not any(map(_is_limited, parent.iterdir())):
            _write(parent / OFFER_FILE, "-cpu")


def is_outside_of_ours(group: Path) -> bool:
    """Whether a group is not in the one that this process is in, whose limits then do not hold."""
    return group.parent != next(cgroup_dirs("cpu"), None)


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


def remove_groups(groups: Iterable[Path]) -> list[Path]:
    """A group that is gone already is fine; returns those that would not go."""
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
            break
    return left


def is_version_2(folder: Path) -> bool:
    return (folder / "cgroup.controllers").exists()


def _make(
    planned: Mapping[int, Path], cpus_of: Mapping[int, float], offering: Path | None
) -> OSError | None:
    """What was in the way, if something was."""
    try:
        if offering is not None:
            _write(offering / OFFER_FILE, "+cpu")
        for node, group in planned.items():
            remove_groups([group])
            group.mkdir()
            set_quota(group, cpus_of[node])
    except OSError as error:
        return error
    if not all(map(_can_join, list(planned.values())[:1])):
        return PermissionError(errno.EACCES, "cannot be joined")
    return None


def _offers_cpu(parent: Path) -> bool:
    try:
        return "cpu" in (parent / OFFER_FILE).read_text(encoding="ascii").split()
    except OSError:
        return False


def _is_limited(child: Path) -> bool:
    for name, unlimited in UNLIMITED.items():
        with contextlib.suppress(OSError):
            if (child / name).read_text(encoding="ascii").split()[:1] != [unlimited]:
                return True
    return False


def _can_join(group: Path) -> bool:
    """A group may be ours to make and yet not ours to move processes into."""
    return not subprocess.run([*join_words(group), "true"], capture_output=True).returncode


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="ascii")
