"""Removing a cluster, and what clusters whose owner died have left behind."""

from __future__ import annotations

import contextlib

from paceline.emulation import cpu_limits, processes
from paceline.emulation.state import VARIABLE, ClusterState, all_paths, load
from paceline.errors import ClusterError


def remove(state: ClusterState) -> None:
    """End every process in the cluster, by its id; the namespaces go with them. Then its groups."""
    if state.boot == processes.boot_id():
        # Holders go last: as long as they live, what is in their namespaces can be told for sure.
        holders = [namespace.holder for namespace in state.namespaces()]
        held = {holder.pid for holder in holders if holder.is_alive()}
        stubborn = processes.end_all(lambda: set(pids_of(state)) - held)
        stubborn += processes.end_all(lambda: pids_of(state))
        processes.reap([*holders, *([] if state.forwarder is None else [state.forwarder])])
        if stubborn:
            raise ClusterError(
                f"cluster {state.name}: process {', '.join(map(str, stubborn))} cannot be ended; "
                f"end it and try `paceline cluster down {state.name}` again"
            )
        if left := cpu_limits.remove_groups(state.groups.values()):
            raise ClusterError(
                f"cluster {state.name}: CPU group {', '.join(map(str, left))} cannot be removed; "
                f"end what is in it and try `paceline cluster down {state.name}` again"
            )
        if state.offering is not None:
            cpu_limits.withdraw_cpu(state.offering)
    state.path.unlink(missing_ok=True)


def pids_of(state: ClusterState, node: int | None = None) -> list[int]:
    """Processes of a cluster or one of its nodes, its holders left out when a node is named.

    A namespace's number may be another's once its holder is gone, so it counts only while held;
    what is left then still carries the cluster's variable in its environment.
    """
    chosen = state.namespaces() if node is None else [state.nodes[node]]
    held = [namespace.number for namespace in chosen if namespace.is_held()]
    found = set(processes.in_namespaces(held))
    if node is not None:
        return sorted(found - {state.nodes[node].holder.pid})
    found.update(cpu_limits.pids_in(state.groups.values()))
    found.update(processes.with_variable(VARIABLE, str(state.path)))
    return sorted(found)


def remove_orphans() -> list[str]:
    """Remove clusters that were to end with a process which is gone; returns their names."""
    swept = []
    for path in all_paths():
        # One that is unreadable or stubborn is told when it is asked for by name.
        with contextlib.suppress(ClusterError):
            state = load(path)
            is_of_past_boot = state.boot != processes.boot_id()
            if is_of_past_boot or (state.owner is not None and not state.owner.is_alive()):
                remove(state)
                swept.append(state.name)
    return swept
