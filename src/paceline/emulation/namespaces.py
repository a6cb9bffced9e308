"""Network namespaces without names: each lives as long as a sleeping process in it, its holder.

What is in a namespace (interfaces, bridge, shaping) goes with its last process, so ending processes
is all it takes to remove a cluster's network, and the machine's own interfaces are never touched.
An ordinary user gets a user namespace around them all.
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
PATIENCE_SECONDS = 20.0
"""For a holder to be in its namespace and for a command that sets something up."""

SYSTEM_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
"""ip and tc often lie where only root's search path leads."""


@dataclass(frozen=True, slots=True)
class Namespace:
    holder: ProcessId
    number: int
    is_of_user: bool
    """Whether it is inside a user namespace."""

    def words(self, words: Sequence[str]) -> list[str]:
        """The command that runs `words` in here."""
        user = ["-U", "--preserve-credentials"] if self.is_of_user else []
        return [program("nsenter"), "-t", str(self.holder.pid), *user, "-n", "--", *words]

    def run(self, words: Sequence[str], given: str = "") -> str:
        """Run a command that sets something up; its output, or ClusterError with what it said."""
        return run(self.words(words), given)

    def is_held(self) -> bool:
        return self.holder.is_alive() and network_namespace(self.holder.pid) == self.number


def create_namespace(
    environment: Mapping[str, str], inside: Namespace | None, *, as_root: bool
) -> Namespace:
    """A new namespace; `inside` says whose user namespace it shares."""
    if as_root or inside is None:
        words = inside_new(HOLDER, as_root)
    else:
        words = inside.words(inside_new(HOLDER, as_root=True))
    pid = spawn(words, environment)
    outside = {network_namespace(os.getpid()), inside.number if inside is not None else None}
    return _wait_until_inside(pid, outside, is_of_user=not as_root)


def spawn(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a process that outlives this one, deaf to the terminal's Ctrl-C."""
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    return os.posix_spawnp(words[0], list(words), environment, file_actions=nothing, setsid=True)


def program(name: str) -> str:
    found = shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise ClusterError(f"an emulated cluster needs the program {name}: install {package}")
    return found


def run(words: Sequence[str], given: str = "") -> str:
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"no answer from {' '.join(words)}") from None
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise ClusterError(f"cannot set up the cluster: {Path(words[0]).name}: {said}")
    return done.stdout


def can_be_root() -> bool:
    """Whether namespaces are to be made as root, else in the user's own; ClusterError: neither."""
    for name in ("ip", "tc", "nsenter"):
        program(name)
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        if not subprocess.run(inside_new(["true"], as_root), capture_output=True).returncode:
            return as_root
    raise ClusterError(
        "cannot make network namespaces here: run as root, or let users have user namespaces "
        "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
    )


def inside_new(words: Sequence[str], as_root: bool) -> list[str]:
    """The command that runs `words` in a network namespace of its own, which goes with it."""
    return [program("unshare"), *([] if as_root else ["-U", "-r"]), "-n", "--", *words]


def _wait_until_inside(pid: int, outside: set[int | None], is_of_user: bool) -> Namespace:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        number = network_namespace(pid)
        if number is None:
            break
        if number not in outside and _runs(pid, HOLDER[0]):
            return Namespace(ProcessId.of(pid), number, is_of_user)
        time.sleep(0.002)
    raise ClusterError("cannot make a network namespace: its holder ended")


def _runs(pid: int, name: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == name
    except OSError:
        return False
