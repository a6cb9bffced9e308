"""A process that removes a run's cluster after the command that created it, even if it is killed.

`python -m paceline.emulation.guardian STATE_FILE`: its stdin is a pipe whose other end the command
holds. The kernel closes that end when the command ends, and the guardian removes the cluster.
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

from paceline.emulation.removal import pids_of, remove
from paceline.emulation.state import ClusterState, load
from paceline.errors import ClusterError
from paceline.sources import search_path

NODE_EXIT_SECONDS = 10.0
"""Time for nodes to notice that their command ended, and to write a checkpoint (launch/)."""
POLL_SECONDS = 0.1
GUARDIAN_EXIT_SECONDS = 10.0
"""Time for the guardian to exit once the cluster is gone."""


class Guardian:
    """Handle of the guardian process: while open, the end of this process ends the cluster."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, path: Path) -> Self:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.emulation.guardian", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search_path()},
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


def main(path: Path) -> None:
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
    own = {namespace.holder.pid for namespace in state.namespaces()}
    if state.forwarder is not None:
        own.add(state.forwarder.pid)
    deadline = time.monotonic() + NODE_EXIT_SECONDS
    while set(pids_of(state)) - own and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
