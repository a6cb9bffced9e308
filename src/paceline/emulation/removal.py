"""Remove a cluster: at its end, as an orphan, or by its guardian process.

`python -m paceline.emulation.removal STATE_FILE` is the guardian, which removes a run's cluster if
the command that created it is killed. Its stdin is a pipe whose other end the command holds. The
kernel closes that end when the command ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from paceline.child_process import pythonpath
from paceline.emulation import cpu_limits, processes
from paceline.emulation.state import VARIABLE, ClusterState, all_paths, load
from paceline.errors import ClusterError

NODE_EXIT_SECONDS = 10.0
"""Time for nodes to notice that their command ended, and to write a checkpoint (launch/)."""
POLL_SECONDS = 0.1
GUARDIAN_EXIT_SECONDS = 10.0
"""Time for the guardian to exit once the cluster is gone."""


def remove(state: ClusterState) -> None:
    """End all processes of a cluster, which removes its namespaces, then remove its CPU groups."""
    if state.boot == processes.boot_id():
        # Holders end last: they keep the namespace numbers valid, which identify the others.
        holders = [namespace.holder for namespace in state.namespaces()]
        held = {holder.pid for holder in holders if holder.is_alive()}
        stubborn = processes.end_all(lambda: set(pids_of(state)) - held)
        stubborn += processes.end_all(lambda: pids_of(state))
        processes.reap([*holders, *([] if state.forwarder is None else [state.forwarder])])
        if stubborn:
            raise ClusterError(
                f"cluster {state.name}: cannot end process {', '.join(map(str, stubborn))}; "
                f"end it and retry `paceline cluster down {state.name}`"
            )
        if left := cpu_limits.remove_groups(state.groups.values()):
            raise ClusterError(
                f"cluster {state.name}: cannot remove CPU group {', '.join(map(str, left))}; "
                f"end the processes in it and retry `paceline cluster down {state.name}`"
            )
        if state.offering is not None:
            cpu_limits.disable_cpu_controller(state.offering)
    state.path.unlink(missing_ok=True)


def end_runs(state: ClusterState) -> bool:
    """End what still runs in the nodes of a cluster; returns whether all of it has ended."""
    return not processes.end_all(lambda: set(pids_of(state)) - _own_pids(state))


def _own_pids(state: ClusterState) -> set[int]:
    """Processes that the cluster consists of."""
    forwarder = [] if state.forwarder is None else [state.forwarder.pid]
    return {*(namespace.holder.pid for namespace in state.namespaces()), *forwarder}


def pids_of(state: ClusterState, node: int | None = None) -> list[int]:
    """Processes of a cluster, or of one node without its holder.

    A namespace's number can be reused after its holder ended, so it is only used while held;
    remaining processes are found by the cluster's environment variable.
    """
    chosen = state.namespaces() if node is None else [state.nodes[node]]
    held = [namespace.number for namespace in chosen if namespace.is_held()]
    found = set(processes.pids_in_namespaces(held))
    if node is not None:
        return sorted(found - {state.nodes[node].holder.pid})
    found.update(cpu_limits.pids_in(state.groups.values()))
    found.update(processes.pids_with_variable(VARIABLE, str(state.path)))
    return sorted(found)


def remove_orphans() -> list[str]:
    """Remove clusters whose owner process has ended; returns their names."""
    removed = []
    for path in all_paths():
        # Errors are reported when the user names the cluster.
        with contextlib.suppress(ClusterError):
            state = load(path)
            is_of_past_boot = state.boot != processes.boot_id()
            if is_of_past_boot or (state.owner is not None and not state.owner.is_alive()):
                remove(state)
                removed.append(state.name)
    return removed


class Guardian:
    """Handle of the guardian process: while open, the end of this process ends the cluster."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, path: Path) -> Self:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.emulation.removal", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": pythonpath()},
                # A signal to the command's process group must not end the guardian.
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"cannot start the cluster's guardian: {error.strerror}") from None
        return cls(process)

    def close(self) -> None:
        """End the guardian, after the cluster has been removed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(GUARDIAN_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def guard(path: Path) -> None:
    """Remove a cluster when stdin ends; the body of the guardian process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    with contextlib.suppress(ClusterError):
        state = load(path)
        _wait_for_nodes(state)
        remove(state)


def _wait_for_nodes(state: ClusterState) -> None:
    """Give processes in the nodes time to exit by themselves."""
    own = _own_pids(state)
    deadline = time.monotonic() + NODE_EXIT_SECONDS
    while set(pids_of(state)) - own and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
