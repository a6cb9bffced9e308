"""Machines that are emulated on this one (`--cluster`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from paceline.emulation.cluster import EmulatedCluster
from paceline.errors import PacelineError, RunError
from paceline.launch.fleet import describe_end
from paceline.launch.node_process import NodeEnd, open_node
from paceline.sources import search_path


class EmulatedFleet:
    def __init__(self, cluster: EmulatedCluster) -> None:
        self._cluster = cluster
        self.addresses = cluster.addresses
        self.cluster_file = str(cluster.state.path)
        self.python = sys.executable

    def start(self, node: int, words: Sequence[str], given: bytes) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": search_path()}
        return open_node(self._cluster.command(node, words), given, environment)

    def explain(self, end: NodeEnd) -> PacelineError:
        return RunError(describe_end(end, self.addresses[end.node]))
