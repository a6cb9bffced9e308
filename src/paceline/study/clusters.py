"""Emulated clusters that the cells of a study share.

A cluster is created and calibrated for the first cell that needs it, stays up for later cells with
the same specification, and is removed at the end of the study, or by its guardian if the runner is
killed. Before each cell, leftover processes in it are ended, and a damaged cluster is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from paceline.config import RunConfig, cluster_spec

if TYPE_CHECKING:
    from paceline.config.cluster_spec import ClusterSpec
    from paceline.emulation.cluster import EmulatedCluster


class StudyClusters:
    """The clusters of a study; they are removed at the end of the block."""

    def __init__(self) -> None:
        self._clusters: list[EmulatedCluster] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._clusters:
            self._clusters.pop().down()

    def variables(self, config: RunConfig) -> dict[str, str]:
        """Environment variables that make a run use the study's cluster; ClusterError without one.

        A run that needs none gets none.
        """
        if config.cluster is None:
            return {}
        # Imported here because most studies have no cluster.
        from paceline.emulation.cluster import SHARED_VARIABLE

        cluster = self._cluster(cluster_spec.parse_recorded(config.cluster))
        return {SHARED_VARIABLE: str(cluster.state.path)}

    def _cluster(self, spec: ClusterSpec) -> EmulatedCluster:
        from paceline.emulation.cluster import EmulatedCluster

        for cluster in self._clusters:
            if cluster.spec != spec:
                continue
            if cluster.clear():
                return cluster
            self._clusters.remove(cluster)
            cluster.down()
            break
        # Only one cell runs at a time, so that the others do not use their cores.
        idle = [cluster.state.path for cluster in self._clusters]
        self._clusters.append(EmulatedCluster.up(spec, idle=idle))
        return self._clusters[-1]
