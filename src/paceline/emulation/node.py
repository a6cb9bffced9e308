"""Run a Python module in a node: `python -m paceline.emulation.node STATE NODE MODULE ...`.

It enters the node like `EmulatedCluster.command`, but without replacing the process, which may be a
fork that has already imported torch. It does so before the module starts a thread.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

from paceline.emulation import cpu_limits
from paceline.emulation.state import VARIABLE, ClusterState, load
from paceline.errors import ERROR_PREFIX, ClusterError

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def enter(state: ClusterState, node: int) -> None:
    """Move this process into a node: its CPU group, its cores and its network."""
    namespace = state.nodes[node]
    if not namespace.is_held():
        raise ClusterError(f"{state.name_of(node)} no longer exists")
    if (group := state.groups.get(node)) is not None:
        (group / cpu_limits.JOIN_FILE).write_text(str(os.getpid()), encoding="ascii")
    if cores := state.cores.get(node):
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            raise ClusterError(cpu_limits.core_refusal(cores, state.name_of(node))) from None
    holder = namespace.holder.pid
    # Its user namespace grants the rights to enter its network.
    kinds = [("user", CLONE_NEWUSER)] if namespace.is_of_user else []
    files = [
        (os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY), kind)
        for name, kind in [*kinds, ("net", CLONE_NEWNET)]
    ]
    setns: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).setns
    for file, kind in files:
        if setns(file, kind):
            cause = os.strerror(ctypes.get_errno())
            raise ClusterError(f"cannot enter {state.name_of(node)}: {cause}")
        os.close(file)
    os.environ[VARIABLE] = str(state.path)


def main(arguments: list[str]) -> None:
    state_file, node, module, *rest = arguments
    try:
        enter(load(Path(state_file)), int(node))
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"{ERROR_PREFIX}{error}\n")
        sys.exit(ClusterError.exit_code)
    sys.argv[:] = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
