"""Latency between nodes: the kernel's netem, or a forwarder process that delays every frame.

The forwarder is compiled from forwarder.c at first use and cached where only this user can write.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from paceline.emulation import calibration, network
from paceline.emulation.namespaces import Namespace, in_new_namespace, program, spawn
from paceline.emulation.processes import ProcessId, end_all, network_namespace, reap
from paceline.emulation.state import ClusterState
from paceline.errors import ClusterError

SOURCE = Path(__file__).with_name("forwarder.c")
COMPILERS = ("cc", "gcc", "clang")
ROOT_CACHE = Path("/var/cache/paceline")


def forwarder() -> Path:
    """Path of the binary of the current source, compiled if necessary.

    It runs with this user's permissions, so a binary that another user could have written is
    compiled again, and a folder that another user can write to is rejected.
    """
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    binary = _cache_folder() / f"forwarder-{key}"
    if not _is_private(binary):
        _compile(binary)
    return binary


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compile(target: Path) -> None:
    found = compiler()
    if found is None:
        raise ClusterError(
            "latency needs the kernel's netem or a C compiler, and neither is available: "
            "install gcc, or omit latency"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_private(target.parent):
            raise ClusterError(f"other users can write to {target.parent}: remove the folder")
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            binary = Path(folder) / target.name
            argv = [found, "-O2", "-o", str(binary), str(SOURCE)]
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode:
                message = (done.stderr.strip() or "no message").splitlines()[0]
                raise ClusterError(f"cannot compile the forwarder for latency: {message}")
            binary.chmod(0o700)
            binary.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot compile into {target.parent}: {error.strerror}") from None


def _cache_folder() -> Path:
    """Separate from the dataset cache, which a group may share; fixed for root."""
    if os.geteuid() == 0:
        return ROOT_CACHE
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline" / "programs"


def _is_private(path: Path) -> bool:
    """Whether only this user can write to an existing file and its folder."""
    try:
        found = path.lstat()
    except OSError:
        return False
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    is_own = found.st_uid == os.geteuid() and not found.st_mode & writable_by_others
    if stat.S_ISREG(found.st_mode):
        return is_own and _is_private(path.parent)
    return is_own and stat.S_ISDIR(found.st_mode)


NETEM_PACKETS = 100_000
"""The default limit of 1,000 drops packets on a fast link."""

START_SECONDS = 10.0
CORRECTIONS = 3
TOLERANCE = 0.03
"""Relative deviation from the requested round trip that needs no correction."""


def join_ports(state: ClusterState, switch: Namespace) -> None:
    """Connect the nodes' ports, with the latency of the spec.

    The machine's own latency is measured and subtracted from the delay.
    """
    requested = state.spec.latency_seconds
    if not requested:
        network.bridge(switch, state.spec.nodes)
        rates = {network.port(node): state.spec.bandwidth(node) for node in range(state.spec.nodes)}
        network.shape(switch, {name: rate for name, rate in rates.items() if rate is not None})
        return
    if has_netem(as_root=not switch.is_of_user):
        network.bridge(switch, state.spec.nodes)
        delay, state.delay = _netem, "netem"
    else:
        delay, state.delay = _forward, "forwarder"
    seconds = requested / 2
    delay(state, switch, seconds)
    for _ in range(CORRECTIONS if state.spec.nodes > 1 else 0):
        excess = calibration.round_trip_seconds(state) - requested
        if abs(excess) < TOLERANCE * requested:
            break
        # Keep a minimum: a measurement that leaves none was taken while the machine was busy.
        seconds = min(max(seconds - excess / 2, requested / 20), requested / 2)
        delay(state, switch, seconds)


def has_netem(*, as_root: bool) -> bool:
    argv = [program("tc"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"]
    return not subprocess.run(in_new_namespace(argv, as_root), capture_output=True).returncode


def _netem(state: ClusterState, switch: Namespace, seconds: float) -> None:
    """Delay at the switch's end of each link, before the link's token bucket."""
    for node in range(state.spec.nodes):
        device = ["dev", network.port(node)]
        argv = ["netem", "delay", f"{seconds * 1e6:.1f}us", "limit", str(NETEM_PACKETS)]
        switch.run([program("tc"), "qdisc", "replace", *device, "root", "handle", "1:", *argv])
        rate = state.spec.bandwidth(node)
        if rate is not None:
            bucket = network.token_bucket(rate).split()
            child = [*device, "parent", "1:1", "handle", "10:", *bucket]
            switch.run([program("tc"), "qdisc", "replace", *child])


def _forward(state: ClusterState, switch: Namespace, seconds: float) -> None:
    """Delay in a forwarder process, which replaces the bridge and limits link rates as well.

    The token bucket at a node's own end stays, so that its TCP adapts to the rate of its link.
    """
    if (before := state.forwarder) is not None:
        end_all(lambda: [before.pid] if before.is_alive() else [])
        reap([before])
    ports = []
    for node in range(state.spec.nodes):
        rate = network.wire_bits_per_second(state.spec.bandwidth(node) or 0.0)
        ports.append(f"{network.port(node)}={rate:.0f}")
    ports.append(f"{network.PROBE_PORT}=0")
    argv = [str(forwarder()), str(round(seconds * 1e9)), *ports]
    pid = spawn(switch.command(argv), state.environment())
    deadline = time.monotonic() + START_SECONDS
    # Before nsenter has entered the switch, /proc shows the machine's own sockets.
    while network_namespace(pid) != switch.number or _count_packet_sockets(pid) < len(ports):
        if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise ClusterError("cannot emulate latency: the forwarder failed to start")
        time.sleep(0.002)
    state.forwarder = ProcessId.of(pid)
    state.save()


def _count_packet_sockets(pid: int) -> int:
    """Packet sockets in the namespace of a process; the forwarder has one for each port."""
    try:
        return len(Path(f"/proc/{pid}/net/packet").read_text(encoding="ascii").splitlines()) - 1
    except OSError:
        return 0
