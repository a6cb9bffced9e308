"""Child processes of a launcher on this machine: workers, parameter servers, other programs.

`LocalProcesses` starts them, from the launcher's fork server if it has one, ends them together and
determines why one failed. It does not import torch, which takes seconds, unless one fails.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from time import monotonic, sleep
from typing import TYPE_CHECKING, Self

from paceline.comm.rank_info import RankInfo
from paceline.errors import RunError
from paceline.launch.fork_server import ChildProcess, ForkServer, start_python
from paceline.launch.signals import describe_exit
from paceline.records import RunFolder

if TYPE_CHECKING:
    from paceline.launch.termination import FailureBoard, Termination

GRACE_SECONDS = 3.0
"""Time for the other processes, after a first failure, to notice it and write their records."""
POLL_SECONDS = 0.02


class LocalProcesses:
    """Processes by rank; those that still run are killed at the end of the block."""

    def __init__(
        self,
        folder: RunFolder,
        world_size: int,
        board: FailureBoard | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        """`board` orders failures across nodes; without one, clocks do.

        Ranks from `world_size` on are parameter servers. Without `fork_server`, every process is a
        new interpreter.
        """
        self.folder = folder
        self.failure_orders: dict[int, int] = {}
        """The board's count for each failed process, in the order in which they were noticed."""
        self._world_size = world_size
        self._board = board
        self._fork_server = fork_server
        self._processes: dict[int, ChildProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, program: str, rank_info: RankInfo, arguments: Sequence[str]) -> None:
        """Start a program of launch/child_main.py.

        RunError if the system starts no process, OSError if the output file cannot be opened.
        """
        rank = rank_info.rank
        with self.output_file(rank).open("ab") as file:
            try:
                self._processes[rank] = start_python(
                    self._fork_server,
                    ["-m", "paceline.launch.child_main", program, *arguments],
                    name=f"{program} {rank}",
                    environment={**os.environ, **rank_info.to_environment()},
                    # Only rank 0 writes to the terminal: the output of several would be mixed.
                    stdout=None if rank == 0 else file.fileno(),
                    stderr=file.fileno(),
                    death_signal=SIGKILL,
                )
            except OSError as error:
                raise RunError(f"cannot start a {program} process: {error.strerror}") from None

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
