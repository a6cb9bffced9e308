"""The forwarder's binary, compiled at first use and kept where nobody else can write.

What joins the ports of a cluster: a bridge, or what delays every frame by half a round trip."""

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
from paceline.emulation.namespaces import Namespace, inside_new, program, spawn
from paceline.emulation.processes import ProcessId, end_all, network_namespace, reap
from paceline.emulation.state import ClusterState
from paceline.errors import ClusterError

SOURCE = Path(__file__).with_name("forwarder.c")
COMPILERS = ("cc", "gcc", "clang")
ROOTS_CACHE = Path("/var/cache/paceline")


def forwarder() -> Path:
    """The path of a binary made from the source as it is now.

    It runs with this user's rights, so one that another user could have written is made anew, and a
    folder that another user can write is refused.
    """
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    kept = _cache_folder() / f"forwarder-{key}"
    if not _is_ours_alone(kept):
        _compile(kept)
    return kept


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _compile(target: Path) -> None:
    found = compiler()
    if found is None:
        raise ClusterError(
            "latency needs the kernel's netem or a C compiler, and there is neither: "
            "install gcc, or leave out latency"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours_alone(target.parent):
            raise ClusterError(f"others can write to {target.parent}: remove it, it is made again")
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            binary = Path(folder) / target.name
            words = [found, "-O2", "-o", str(binary), str(SOURCE)]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                said = (done.stderr.strip() or "no reason given").splitlines()[0]
                raise ClusterError(f"cannot compile the forwarder for latency: {said}")
            binary.chmod(0o700)
            binary.replace(target)
    except OSError as error:
        raise ClusterError(f"cannot compile into {target.parent}: {error.strerror}") from None


def _cache_folder() -> Path:
    """Of datasets' folders apart, which a group may share; of the environment apart, for root."""
    if os.geteuid() == 0:
        return ROOTS_CACHE
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline" / "programs"


def _is_ours_alone(path: Path) -> bool:
    """Whether it is there and only this user can write it, and the folder it is in alike."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    is_kept = found.st_uid == os.geteuid() and not found.st_mode & others
    if stat.S_ISREG(found.st_mode):
        return is_kept and _is_ours_alone(path.parent)
    return is_kept and stat.S_ISDIR(found.st_mode)


NETEM_PACKETS = 100_000
"""netem's own limit of 1,000 would lose packets on a fast link."""

START_SECONDS = 10.0
CORRECTIONS = 3
NEAR_ENOUGH = 0.03
"""Part of the asked round trip by which it may be off without another correction."""


def join_ports(state: ClusterState, switch: Namespace) -> None:
    """Let the nodes reach each other, with the latency of the spec.

    The machine's own share of a round trip is measured and taken off the delay.
    """
    asked = state.spec.latency_seconds
    if not asked:
        network.bridge(switch, state.spec.nodes)
        rates = {network.port(node): state.spec.bandwidth(node) for node in range(state.spec.nodes)}
        network.shape(switch, {name: rate for name, rate in rates.items() if rate is not None})
        return
    if has_netem(as_root=not switch.is_of_user):
        network.bridge(switch, state.spec.nodes)
        delay, state.delay = _netem, "netem"
    else:
        delay, state.delay = _forward, "forwarder"
    seconds = asked / 2
    delay(state, switch, seconds)
    for _ in range(CORRECTIONS if state.spec.nodes > 1 else 0):
        excess = calibration.round_trip_seconds(state) - asked
        if abs(excess) < NEAR_ENOUGH * asked:
            break
        # A machine whose own share is all of it must have been busy with something else just then.
        seconds = min(max(seconds - excess / 2, asked / 20), asked / 2)
        delay(state, switch, seconds)


def has_netem(*, as_root: bool) -> bool:
    words = [program("tc"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"]
    return not subprocess.run(inside_new(words, as_root), capture_output=True).returncode


def _netem(state: ClusterState, switch: Namespace, seconds: float) -> None:
    """At the switch's end of each link, with the link's token bucket behind the delay."""
    for node in range(state.spec.nodes):
        device = ["dev", network.port(node)]
        words = ["netem", "delay", f"{seconds * 1e6:.1f}us", "limit", str(NETEM_PACKETS)]
        switch.run([program("tc"), "qdisc", "replace", *device, "root", "handle", "1:", *words])
        rate = state.spec.bandwidth(node)
        if rate is not None:
            bucket = network.token_bucket(rate).split()
            child = [*device, "parent", "1:1", "handle", "10:", *bucket]
            switch.run([program("tc"), "qdisc", "replace", *child])


def _forward(state: ClusterState, switch: Namespace, seconds: float) -> None:
    """By a process of ours in place of a bridge, which holds links to their rates as well.

    The token bucket at a node's own end stays, so that its TCP feels how fast its link is.
    """
    if (before := state.forwarder) is not None:
        end_all(lambda: [before.pid] if before.is_alive() else [])
        reap([before])
    ports = [
        f"{network.port(node)}={network.framed(state.spec.bandwidth(node) or 0.0):.0f}"
        for node in range(state.spec.nodes)
    ]
    ports.append(f"{network.PROBE_PORT}=0")
    words = [str(forwarder()), str(round(seconds * 1e9)), *ports]
    pid = spawn(switch.words(words), state.environment())
    deadline = time.monotonic() + START_SECONDS
    # Until nsenter has entered the switch, its id shows the machine's own sockets.
    while network_namespace(pid) != switch.number or _sockets_of_packets(pid) < len(ports):
        if time.monotonic() > deadline or os.waitpid(pid, os.WNOHANG) != (0, 0):
            raise ClusterError("cannot make latency: the forwarder ended at its start")
        time.sleep(0.002)
    state.forwarder = ProcessId.of(pid)
    state.save()


def _sockets_of_packets(pid: int) -> int:
    """In the namespace of a process: those by which the forwarder reads its ports."""
    try:
        return len(Path(f"/proc/{pid}/net/packet").read_text(encoding="ascii").splitlines()) - 1
    except OSError:
        return 0
