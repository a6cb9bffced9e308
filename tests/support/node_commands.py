"""Run commands on the nodes of an emulated cluster."""

from __future__ import annotations

import subprocess
import sys
import time

from paceline.config.cluster_spec import parse
from paceline.emulation.cluster import EmulatedCluster
from paceline.emulation.network import port

CUT_SECONDS = 5.0
"""How long a link is down before it comes back."""


def small_cluster(text: str, name: str | None = None) -> EmulatedCluster:
    """Create a cluster without calibration, which takes seconds."""
    return EmulatedCluster.up(parse(text), name, calibrate=False)


def run_on_node(
    cluster: EmulatedCluster, node: int, *argv: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster.command(node, argv), input=stdin, capture_output=True, text=True, timeout=60
    )


def run_python_on_node(cluster: EmulatedCluster, node: int, program: str, *argv: str) -> str:
    done = run_on_node(cluster, node, sys.executable, "-I", "-S", "-c", program, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def set_link(cluster: EmulatedCluster, node: int, state: str) -> None:
    """Set the link of a node to `down` or `up`."""
    assert cluster.state.switch is not None
    cluster.state.switch.run(["ip", "link", "set", port(node), state])


def interrupt_link(cluster: EmulatedCluster, node: int) -> None:
    set_link(cluster, node, "down")
    time.sleep(CUT_SECONDS)
    set_link(cluster, node, "up")


ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    listener.settimeout(60)
    print(listener.getsockname()[1], flush=True)
    peer, _ = listener.accept()
with peer:
    while received := peer.recv(1 << 20):
        peer.sendall(received)
"""
"""Echoes the data of one connection."""

THERE_AND_BACK = """
import hashlib, socket, sys, threading
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
content = bytes(number * 7 % 251 for number in range(1 << 16)) * (count >> 16)
with socket.create_connection((address, port), 60) as peer:
    sender = threading.Thread(target=lambda: (peer.sendall(content), peer.shutdown(socket.SHUT_WR)))
    sender.start()
    back = hashlib.sha256()
    while received := peer.recv(1 << 20):
        back.update(received)
    sender.join()
print(back.hexdigest() == hashlib.sha256(content).hexdigest())
"""
"""Prints whether the data that an echo server returns equals the data sent."""


def echoes_unchanged(cluster: EmulatedCluster, source: int, echo: int, count_bytes: int) -> bool:
    """Return whether data travels from one node to another and back unchanged."""
    address = cluster.addresses[echo]
    argv = [sys.executable, "-I", "-S", "-c", ECHO, address]
    with subprocess.Popen(cluster.command(echo, argv), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        expected = run_python_on_node(
            cluster, source, THERE_AND_BACK, address, port, str(count_bytes)
        )
    return expected == "True"
