"""Starting one process of a team: a worker, a server, or a program of another kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.child_process import pythonpath
from paceline.comm.rank_info import RankInfo
from paceline.errors import RunError


def spawn(
    role: str, place: RankInfo, arguments: Sequence[str], output: Path, shown: bool = False
) -> subprocess.Popen[bytes]:
    """A process that ends with this one; what it says goes into a file, except what is `shown`.

    RunError where the system starts no process, OSError where the file cannot be opened.

    `role`: worker, server, or a module with a `main` of its own.
    """
    command = [sys.executable, "-m", "paceline.launch.child_main", str(os.getpid()), role]
    with output.open("ab") as file:
        try:
            return subprocess.Popen(
                [*command, *arguments],
                env={
                    **os.environ,
                    **place.to_environment(),
                    "PYTHONPATH": pythonpath(),
                },
                stdout=None if shown else file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                # Ctrl-C reaches the whole foreground group; the launcher decides what to do.
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"cannot start a {role} process: {error.strerror}") from None
