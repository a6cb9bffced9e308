"""Machines on which this command starts processes, and a command that runs on all of them.

`Machines` starts a process on one of its nodes: over ssh (launch/remote/ssh.py), on a Ray cluster
(launch/ray/machines.py) or in the emulated cluster of this module. `run_on_nodes` starts one on
each, shows their output, ends them together and returns the root cause of a failure.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple, Protocol, Self

from paceline.child_process import pythonpath
from paceline.emulation.cluster import EmulatedCluster
from paceline.errors import PacelineError, RunError, UsageError, from_exit_code
from paceline.launch.fork_server import ChildProcess, ForkServer, start_python
from paceline.launch.remote.control_channel import (
    HEARTBEAT_SECONDS,
    NodeExit,
    NodeProcess,
    popen_piped,
    send_request,
)
from paceline.launch.signals import SignalMonitor, describe_exit

POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
"""Time for the other nodes, after a failure, to notice it and send their records."""
AFTER_FIRST_SECONDS = 3.0
"""Time for the other nodes once node 0, which serves the store, has ended."""
KILL_SECONDS = 12.0
"""How long a node may take to end after its input is closed; then it is killed."""


class Machines(Protocol):
    @property
    def addresses(self) -> Sequence[str]:
        """The address of each node for the other nodes and in messages."""

    @property
    def cluster_file(self) -> str | None:
        """The state file of an emulated cluster; None for real machines."""

    @property
    def python(self) -> str:
        """The Python interpreter on these machines that has paceline."""

    def start(self, node: int, argv: Sequence[str], request: bytes) -> ChildProcess:
        """Start a command on a node, with pipes for its input, output and errors.

        `request` is written to its input, which stays open as long as the launcher runs.
        """

    def explain(self, end: NodeExit) -> PacelineError:
        """Why a command failed that reported no error."""


class NodeExits(NamedTuple):
    """How the processes on all nodes ended."""

    exits: list[NodeExit]
    failure: NodeExit | None
    """The first one, of those that the run did not recover from."""
    error: PacelineError | None
    """The failure as an error."""


def run_on_nodes(
    machines: Machines,
    argv_of: Callable[[int], list[str]],
    request_of: Callable[[int], bytes],
    signals: SignalMonitor,
    min_nodes: int | None = None,
) -> NodeExits:
    """Run a command on each node, with its request as input, until all have ended.

    The output of node 0 is shown unchanged, that of the others after their addresses. The first
    failure, or Ctrl-C, stops all nodes. With `min_nodes` the run continues without lost nodes, as
    long as that many remain and node 0 is one of them.
    """
    with NodeSupervisor(machines, signals, min_nodes) as supervisor:
        exits = supervisor.run(argv_of, request_of)
    candidates = [each for each in exits if each.node not in supervisor.lost_nodes]
    if min_nodes is not None and not exits[0].code:
        # The run recovered from every loss, because it ended well.
        candidates = []
    failed = (each for each in candidates if each.code)
    failure = min(failed, key=lambda each: each.ended, default=None)
    return NodeExits(exits, failure, error_of(machines, failure, exits) if failure else None)


def error_of(machines: Machines, failure: NodeExit, ends: Sequence[NodeExit]) -> PacelineError:
    """The error that the failed node reported, otherwise what the machines know of it."""
    if not failure.error_message:
        return machines.explain(failure)
    # An error that several nodes report concerns the whole run.
    others = (end for end in ends if end is not failure)
    is_shared = any(end.error_message == failure.error_message for end in others)
    where = "" if is_shared else f"{machines.addresses[failure.node]}: "
    return from_exit_code(failure.code or 1, where + failure.error_message)


def describe_node_exit(end: NodeExit, address: str) -> str:
    """A failure for which the node reported no error."""
    return describe_exit(f"node {end.node} ({address})", end.code or 0, end.last_line)


class NodeSupervisor:
    """Supervises one process on each node; none outlives the block."""

    def __init__(
        self, machines: Machines, signals: SignalMonitor, min_nodes: int | None = None
    ) -> None:
        """`min_nodes`: how many must remain, node 0 among them; None: all."""
        self._machines = machines
        self._min_nodes = min_nodes
        self.lost_nodes: set[int] = set()
        """Nodes that ended, and that the run continued without."""
        self._signals = signals
        self._nodes: list[NodeProcess] = []
        self._selector = selectors.DefaultSelector()
        self._stop_at: float | None = None
        """When to close the input of the nodes that still run."""
        self._forwarded = 0
        """How many signals were forwarded."""
        self._heartbeat_at = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.close()
        self._selector.close()

    def run(
        self, argv_of: Callable[[int], list[str]], request_of: Callable[[int], bytes]
    ) -> list[NodeExit]:
        """Start all, forward signals, and return when all have ended."""
        for number, address in enumerate(self._machines.addresses):
            process = self._machines.start(number, argv_of(number), request_of(number))
            prefix = f"[{address}] " if number else ""
            self._nodes.append(NodeProcess(number, process, prefix))
            self._nodes[-1].register(self._selector)
        self._signals.raise_on_signal = False
        while any(node.is_running for node in self._nodes):
            for key, _ in self._selector.select(POLL_SECONDS):
                key.data(self._selector)
            for node in self._nodes:
                node.poll(self._selector)
            self._forward_signals()
            self._send_heartbeat()
            self._end_together()
        if sys.stdout.isatty():
            # If node 0 was killed, its live line remains and the cursor is hidden.
            sys.stdout.write("\r\x1b[2K\x1b[?25h")
        sys.stdout.flush()
        sys.stderr.flush()
        return [node.end for node in self._nodes]

    def _forward_signals(self) -> None:
        received = self._signals.received
        for number in received[self._forwarded :]:
            for node in self._nodes:
                node.send(f"{number.name}\n".encode())
        if len(received) > max(2, self._forwarded):
            for node in self._nodes:
                node.kill()
        elif len(received) == 2 and self._forwarded < 2:
            self._stop_at = monotonic()
        self._forwarded = len(received)

    def _send_heartbeat(self) -> None:
        if monotonic() - self._heartbeat_at > HEARTBEAT_SECONDS:
            self._heartbeat_at = monotonic()
            for node in self._nodes:
                node.send(b"\n")

    def _end_together(self) -> None:
        """After the first failure, end the other nodes as well."""
        now = monotonic()
        failed = [node.end for node in self._nodes if node.end.code]
        if self._can_continue(failed):
            return
        if failed and self._stop_at is None:
            first = min(failed, key=lambda end: end.ended)
            # The others wait in vain for a node that did not start or rejected the run.
            is_rejection = not first.has_started or first.code == UsageError.exit_code
            self._stop_at = now + (0.0 if is_rejection else GRACE_SECONDS)
        if not self._nodes[0].is_running:
            # It waited for the others, which cannot continue without it.
            ended = self._nodes[0].end.ended
            latest = ended + (AFTER_FIRST_SECONDS if failed else GRACE_SECONDS)
            self._stop_at = latest if self._stop_at is None else min(self._stop_at, latest)
        if self._stop_at is None or now < self._stop_at:
            return
        for node in self._nodes:
            with contextlib.suppress(OSError):
                node.close_stdin()
            if now > self._stop_at + KILL_SECONDS:
                node.kill()

    def _can_continue(self, failed: Sequence[NodeExit]) -> bool:
        """Whether the run continues without the failed nodes; reports each of them."""
        if self._min_nodes is None or self._stop_at is not None:
            return False
        is_enough = len(self._nodes) - len(failed) >= self._min_nodes
        if not is_enough or any(end.node == 0 for end in failed):
            return False
        for end in failed:
            if end.node not in self.lost_nodes:
                self.lost_nodes.add(end.node)
                cause = end.error_message or self._machines.explain(end)
                sys.stderr.write(f"paceline: continuing without node {end.node}: {cause}\n")
        return True


class EmulatedMachines:
    """Nodes of an emulated cluster (`--cluster`)."""

    def __init__(self, cluster: EmulatedCluster, fork_server: ForkServer | None = None) -> None:
        self._cluster = cluster
        self._fork_server = fork_server
        self.addresses = cluster.addresses
        self.cluster_file = str(cluster.state.path)
        self.python = sys.executable

    def start(self, node: int, argv: Sequence[str], request: bytes) -> ChildProcess:
        if self._fork_server is None or argv[:2] != [self.python, "-m"]:
            environment = {**os.environ, "PYTHONPATH": pythonpath()}
            return popen_piped(self._cluster.command(node, argv), request, environment)
        process = start_python(
            self._fork_server,
            ["-m", "paceline.emulation.node", str(self._cluster.state.path), str(node), *argv[2:]],
            name=f"node {node}",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        send_request(process, request)
        return process

    def explain(self, end: NodeExit) -> PacelineError:
        return RunError(describe_node_exit(end, self.addresses[end.node]))
