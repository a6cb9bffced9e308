"""Child processes of a launcher on this machine: workers, parameter servers, other programs.

`LocalProcesses` starts them, ends them together and determines why one failed. It does not import
torch, which takes seconds, unless one fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from signal import Signals
from time import monotonic, sleep
from typing import TYPE_CHECKING, Self

from paceline.child_process import pythonpath
from paceline.comm.rank_info import RankInfo
from paceline.errors import RunError
from paceline.launch.signals import describe_exit
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.launch.termination import FailureBoard, Termination

GRACE_SECONDS = 3.0
"""Time for the other processes, after a first failure, to notice it and write their records."""
POLL_SECONDS = 0.05


class LocalProcesses:
    """Processes by rank; those that still run are killed at the end of the block."""

    def __init__(
        self, folder: RunFolder, world_size: int, board: FailureBoard | None = None
    ) -> None:
        """`board` orders failures across nodes; without one, clocks do.

        Ranks from `world_size` on are parameter servers.
        """
        self.folder = folder
        self.failure_orders: dict[int, int] = {}
        """The board's count for each failed process, in the order in which they were noticed."""
        self._world_size = world_size
        self._board = board
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, program: str, rank_info: RankInfo, arguments: Sequence[str]) -> None:
        """Start a program of launch/child_main.py.

        RunError if the system starts no process, OSError if the output file cannot be opened.
        """
        rank = rank_info.rank
        # Only rank 0 writes to the terminal: the output of several ranks would be mixed.
        self._processes[rank] = spawn(
            program, rank_info, arguments, self.output_file(rank), shown=rank == 0
        )

    def codes(self) -> dict[int, int | None]:
        """The exit code of each process by rank; None while it runs."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        new = [rank for rank, code in codes.items() if code and rank not in self.failure_orders]
        if new:
            order = self._board.next_order() if self._board else 0
            self.failure_orders |= dict.fromkeys(new, order)
        return codes

    def signal(self, number: Signals) -> None:
        """Send a signal to all that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def terminate(
        self, grace_seconds: float = GRACE_SECONDS, servers: Collection[int] = ()
    ) -> dict[int, int | None]:
        """Wait for processes to end, at most `grace_seconds`, and kill the others.

        Returns the exit codes before that; None for those that were killed. Only the end of
        `servers` is not waited for.
        """
        deadline = monotonic() + grace_seconds
        codes: dict[int, int | None] = {}
        while monotonic() < deadline and any(
            code is None for rank, code in self.codes().items() if rank not in servers
        ):
            if servers and not codes and monotonic() > deadline - grace_seconds / 2:
                # A server may wait for the worker that was lost, and other workers for the server.
                codes = {rank: self._processes[rank].poll() for rank in servers}
                for rank in servers:
                    self._processes[rank].kill()
            sleep(POLL_SECONDS)
        codes = {**self.codes(), **codes}
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def reported_failures(self) -> list[Termination]:
        """Failures that the processes reported themselves before training."""
        from paceline.launch.termination import read_failures

        return read_failures(self.folder, self._processes, self.failure_orders, self._board)

    def exit_cause(
        self, codes: Mapping[int, int | None], reported: Termination | None
    ) -> Termination | None:
        """The root cause by exit codes, unless `reported` is one; it may be secondary."""
        from paceline.launch.termination import Termination

        if reported and not reported.is_secondary:
            return reported
        failed = [
            (rank, code, order)
            for rank, order in self.failure_orders.items()
            if (code := codes[rank])
        ]
        for rank, code, order in failed:
            if code < 0:
                cause = describe_exit(self.name(rank), code, "")
                return Termination(cause, is_loss=True, order=order)
        if failed and not reported:
            rank, code, order = failed[0]
            cause = describe_exit(self.name(rank), code, self._last_line(rank))
            return Termination(cause, order=order)
        return reported

    def _last_line(self, rank: int) -> str:
        try:
            text = self.output_file(rank).read_text(errors="replace").strip()
        except OSError as error:
            return f"its output cannot be read ({error.strerror})"
        return text.splitlines()[-1] if text else ""

    def output_file(self, rank: int) -> Path:
        return self.folder.output_file(self.name(rank).removeprefix("rank ").replace(" ", "-"))

    def name(self, rank: int) -> str:
        """As messages call the process."""
        servers = self._world_size
        return f"rank {rank}" if rank < servers else f"server {rank - servers}"


def spawn(
    program: str, rank_info: RankInfo, arguments: Sequence[str], output: Path, shown: bool
) -> subprocess.Popen[bytes]:
    """Start a child process that ends with this one; unless `shown`, `output` gets its stdout."""
    command = [sys.executable, "-m", "paceline.launch.child_main", str(os.getpid()), program]
    with output.open("ab") as file:
        try:
            return subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, **rank_info.to_environment(), "PYTHONPATH": pythonpath()},
                stdout=None if shown else file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                # Ctrl-C reaches the whole foreground group; the launcher decides what to do.
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"cannot start a {program} process: {error.strerror}") from None
