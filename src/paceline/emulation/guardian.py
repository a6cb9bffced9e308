"""A process that removes a run's cluster when the command that made it is gone, killed or not.

`python -m paceline.emulation.guardian STATE_FILE`: its input is a pipe whose other end the command
holds. The kernel closes that end however the command ends, and then the cluster is removed.
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

ENDING_SECONDS = 10.0
"""What nodes get to notice that their command is gone, and to write a checkpoint (launch/)."""
POLL_SECONDS = 0.1
LEAVING_SECONDS = 10.0
"""How long a command waits for its guardian, which has nothing left to do."""


class Guardian:
    """The command's side: while it is open, the end of this process ends the cluster."""

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
                # Whatever ends the command and its group must not end this one as well.
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"cannot start the cluster's guardian: {error.strerror}") from None
        return cls(process)

    def close(self) -> None:
        """To be called when the cluster is gone; the guardian then finds nothing to do."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(LEAVING_SECONDS)
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
        _await_nodes(state)
        remove(state)


def _await_nodes(state: ClusterState) -> None:
    """Let what runs in the nodes end by itself."""
    own = {namespace.holder.pid for namespace in state.namespaces()}
    if state.forwarder is not None:
        own.add(state.forwarder.pid)
    deadline = time.monotonic() + ENDING_SECONDS
    while set(pids_of(state)) - own and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
