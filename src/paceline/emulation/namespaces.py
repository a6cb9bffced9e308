"""Unnamed network namespaces, each kept alive by a sleeping process in it, its holder.

Everything in a namespace (interfaces, bridge, shaping) disappears with its last process, so ending
processes removes a cluster's network, and the machine's own interfaces are never modified. For an
unprivileged user all namespaces of a cluster are inside one user namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.emulation.processes import ProcessId, network_namespace
from paceline.errors import ClusterError

HOLDER = ("sleep", "infinity")
TIMEOUT_SECONDS = 20.0
"""For a holder to enter its namespace, and for a setup command."""

SYSTEM_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
"""ip and tc are often only in root's search path."""


@dataclass(frozen=True, slots=True)
class Namespace:
    holder: ProcessId
    number: int
    is_of_user: bool
    """Whether it is inside a user namespace."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """Wrap a command so that it runs in this namespace."""
        user = ["-U", "--preserve-credentials"] if self.is_of_user else []
        return [program("nsenter"), "-t", str(self.holder.pid), *user, "-n", "--", *argv]

    def run(self, argv: Sequence[str], stdin: str = "") -> str:
        """Run a setup command and return its output; ClusterError has its error message."""
        return run(self.command(argv), stdin)

    def is_held(self) -> bool:
        return self.holder.is_alive() and network_namespace(self.holder.pid) == self.number


def create_namespace(
    environment: Mapping[str, str], sibling: Namespace | None, *, as_root: bool
) -> Namespace:
    """Create a namespace in the user namespace of `sibling`, if there is one."""
    if as_root or sibling is None:
        argv = in_new_namespace(HOLDER, as_root)
    else:
        argv = sibling.command(in_new_namespace(HOLDER, as_root=True))
    pid = spawn(argv, environment)
    outside = {network_namespace(os.getpid()), sibling.number if sibling is not None else None}
    return _wait_until_inside(pid, outside, is_of_user=not as_root)


def spawn(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a process that outlives this one, in a session without the terminal's Ctrl-C."""
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    return os.posix_spawnp(argv[0], list(argv), environment, file_actions=nothing, setsid=True)


def program(name: str) -> str:
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise ClusterError(f"an emulated cluster needs the program {name}: install {package}")
    return found


def run(argv: Sequence[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"timeout after {TIMEOUT_SECONDS:g} s: {' '.join(argv)}") from None
    if done.returncode:
        message = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise ClusterError(f"cannot set up the cluster: {Path(argv[0]).name}: {message}")
    return done.stdout


def can_be_root() -> bool:
    """Whether namespaces need no user namespace; ClusterError if neither kind is available."""
    for name in ("ip", "tc", "nsenter"):
        program(name)
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        if not subprocess.run(in_new_namespace(["true"], as_root), capture_output=True).returncode:
            return as_root
    raise ClusterError(
        "cannot create network namespaces: run as root, or enable user namespaces "
        "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
    )


def in_new_namespace(argv: Sequence[str], as_root: bool) -> list[str]:
    """Wrap a command so that it runs in a new network namespace, which ends with it."""
    return [program("unshare"), *([] if as_root else ["-U", "-r"]), "-n", "--", *argv]


def _wait_until_inside(pid: int, outside: set[int | None], is_of_user: bool) -> Namespace:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        number = network_namespace(pid)
        if number is None:
            break
        if number not in outside and _runs(pid, HOLDER[0]):
            return Namespace(ProcessId.of(pid), number, is_of_user)
        time.sleep(0.002)
    raise ClusterError("cannot create a network namespace: its holder process ended")


def _runs(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == name
    except OSError:
        return False
