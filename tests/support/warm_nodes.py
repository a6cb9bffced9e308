"""Emulated machines whose nodes and workers start warm (tests/support/warm.py).

As a program, `python -m tests.support.warm_nodes` is a node: it enters the network of its machine,
reads its input from its starter's pipe and then runs as
`python -m paceline.launch.remote.node_main`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence

from paceline.child_process import pythonpath
from paceline.emulation.cluster import EmulatedCluster
from paceline.emulation.state import VARIABLE
from paceline.launch.remote.machines import EmulatedMachines
from tests.support import warm
from tests.support.commands import HERE

NETWORK, INPUT = "WARM_NETWORK", "WARM_INPUT"
"""Variables that name the files of a machine's network and of a node's input."""
NODE = "paceline.launch.remote.node_main"
CLONE_NEWNET = 0x40000000


class WarmFleet(EmulatedMachines):
    def __init__(self, cluster: EmulatedCluster, starter: warm.PrewarmedStarter) -> None:
        super().__init__(cluster)
        assert not cluster.state.groups, "a node would have to enter its group as well"
        self._nursery = starter

    def start(self, node: int, argv: Sequence[str], request: bytes) -> subprocess.Popen[bytes]:
        if list(argv[1:]) != ["-m", NODE]:
            return super().start(node, argv, request)
        holder = self._cluster.state.nodes[node].holder
        theirs, ours = os.pipe()
        variables = {
            NETWORK: f"/proc/{holder.pid}/ns/net",
            INPUT: f"/proc/{os.getpid()}/fd/{theirs}",
            VARIABLE: str(self._cluster.state.path),
            "PYTHONPATH": os.pathsep.join([pythonpath(), str(HERE.parents[1])]),
        }
        pipe = subprocess.PIPE
        process = self._nursery.start(
            ["-m", "tests.support.warm_nodes"],
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, **variables},
            start_new_session=True,
            name=f"node {node}",
        )
        process.stdin = os.fdopen(ours, "wb")
        process.stdin.write(request)
        process.stdin.flush()
        # Its first word tells that it has opened the other end.
        assert process.stderr is not None
        assert os.read(process.stderr.fileno(), 1) == b"\n"
        os.close(theirs)
        return process


def main() -> None:
    network = os.open(os.environ.pop(NETWORK), os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network")
    os.close(network)
    source = os.open(os.environ.pop(INPUT), os.O_RDONLY)
    os.dup2(source, 0)
    os.close(source)
    os.write(2, b"\n")
    warm._open_own_starter()
    sys.argv[:] = [NODE]
    runpy.run_module(NODE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
