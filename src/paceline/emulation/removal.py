"""Remove a cluster, and clusters whose owner has died."""

from __future__ import annotations

import contextlib

from paceline.emulation import cpu_limits, processes
from paceline.emulation.state import VARIABLE, ClusterState, all_paths, load
from paceline.errors import ClusterError


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
