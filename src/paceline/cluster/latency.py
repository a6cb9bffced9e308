"""What joins the ports of a cluster: a bridge, or what delays every frame by half a round trip."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from paceline.cluster import compile, links, measuring
from paceline.cluster.namespaces import Namespace, inside_new, program, spawn
from paceline.cluster.processes import ProcessId, end_all, network_namespace, reap
from paceline.cluster.state import State
from paceline.errors import ClusterError

NETEM_PACKETS = 100_000
"""netem's own limit of 1,000 would lose packets on a fast link."""

START_SECONDS = 10.0
CORRECTIONS = 3
NEAR_ENOUGH = 0.03
"""Part of the asked round trip by which it may be off without another correction."""


def join_ports(state: State, switch: Namespace) -> None:
    """Let the nodes reach each other, with the latency of the spec.

    The machine's own share of a round trip is measured and taken off the delay.
    """
    asked = state.spec.latency_seconds
    if not asked:
        links.bridge(switch, state.spec.nodes)
        rates = {links.port(node): state.spec.bandwidth(node) for node in range(state.spec.nodes)}
        links.shape(switch, {name: rate for name, rate in rates.items() if rate is not None})
        return
    if has_netem(as_root=not switch.is_of_user):
        links.bridge(switch, state.spec.nodes)
        delay, state.delay = _netem, "netem"
    else:
        delay, state.delay = _forward, "forwarder"
    seconds = asked / 2
    delay(state, switch, seconds)
    for _ in range(CORRECTIONS if state.spec.nodes > 1 else 0):
        excess = measuring.round_trip_seconds(state) - asked
        if abs(excess) < NEAR_ENOUGH * asked:
            break
        # A machine whose own share is all of it must have been busy with something else just then.
        seconds = min(max(seconds - excess / 2, asked / 20), asked / 2)
        delay(state, switch, seconds)


def has_netem(*, as_root: bool) -> bool:
    words = [program("tc"), "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us"]
    return not subprocess.run(inside_new(words, as_root), capture_output=True).returncode


def _netem(state: State, switch: Namespace, seconds: float) -> None:
    """At the switch's end of each link, with the link's token bucket behind the delay."""
    for node in range(state.spec.nodes):
        device = ["dev", links.port(node)]
        words = ["netem", "delay", f"{seconds * 1e6:.1f}us", "limit", str(NETEM_PACKETS)]
        switch.run([program("tc"), "qdisc", "replace", *device, "root", "handle", "1:", *words])
        rate = state.spec.bandwidth(node)
        if rate is not None:
            bucket = links.token_bucket(rate).split()
            child = [*device, "parent", "1:1", "handle", "10:", *bucket]
            switch.run([program("tc"), "qdisc", "replace", *child])


def _forward(state: State, switch: Namespace, seconds: float) -> None:
    """By a process of ours in place of a bridge, which holds links to their rates as well.

    The token bucket at a node's own end stays, so that its TCP feels how fast its link is.
    """
    if (before := state.forwarder) is not None:
        end_all(lambda: [before.pid] if before.is_alive() else [])
        reap([before])
    ports = [
        f"{links.port(node)}={links.framed(state.spec.bandwidth(node) or 0.0):.0f}"
        for node in range(state.spec.nodes)
    ]
    ports.append(f"{links.PROBE_PORT}=0")
    words = [str(compile.forwarder()), str(round(seconds * 1e9)), *ports]
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
