"""What joins the ports of a cluster: a bridge, or something that delays every frame."""

from __future__ import annotations

from paceline.cluster import links
from paceline.cluster.state import State
from paceline.errors import ClusterError


def join_ports(state: State) -> None:
    if state.switch is None:
        raise ClusterError(f"cluster {state.name} has no switch")
    links.bridge(state.switch, state.spec.nodes)
