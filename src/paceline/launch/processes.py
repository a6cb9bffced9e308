"""The processes of one node, workers and servers, from their start to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from signal import Signals
from time import monotonic, sleep
from typing import Self

from paceline.comm.communicator import format_ranks
from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.errors import RunError, StoppedError
from paceline.launch.nodes import POLL_SECONDS, NodeCoordinator
from paceline.launch.parameter_servers import server_ranks
from paceline.launch.record_collection import read_reports
from paceline.launch.signals import SignalMonitor, describe_exit
from paceline.launch.spawn import spawn
from paceline.launch.termination import FailureBoard, Termination, read_failure, root_cause
from paceline.measure.sampler import ResourceSampler
from paceline.records import SCHEMA, RunFolder, explain_write_error, write_json
from paceline.training.rank_report import RankReport

GRACE_SECONDS = 3.0
"""What the others get, after a first failure, to notice it themselves and write down their part."""


class NodeWorkers:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        port: int,
        resumed: bool,
        quiet: bool,
        attempt: int = 0,
        board: FailureBoard | None = None,
    ) -> None:
        """`attempt`: of several, where the workers of each meet at the same store.

        `board`: where failures of all nodes are put in order; without one, clocks decide.
        """
        self.folder = folder
        self.trouble: str | None = None
        """What kept the resources from being sampled."""
        self.config = config
        self._port = port
        self._attempt = attempt
        self._arguments = ["resumed" if resumed else "new", "quiet" if quiet else "shown"]
        self._launch_file = folder.launch_file(config.node_rank)
        first_rank = config.node_rank * config.nproc_per_node
        self._ranks = range(first_rank, first_rank + config.nproc_per_node)
        self._members = [*self._ranks, *server_ranks(config, config.node_rank)]
        """Workers and servers of this node."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._board = board
        self._orders: dict[int, int] = {}
        """The board's count when each failed process was noticed, in the order of noticing."""
        self._forwarded: Signals | None = None
        self._sampler = ResourceSampler(
            folder.resources_file(config.node_rank),
            [os.getpid()],
            node=config.node_rank,
            interval_seconds=config.sample_seconds,
        )

    def __enter__(self) -> Self:
        try:
            self.clear_traces(reports=True)
            write_json(self._launch_file, {"schema": SCHEMA, "config": self.config.to_dict()})
            for rank in self._members:
                self._processes[rank] = self._start(rank)
            self._sampler.start()
        except OSError as error:
            # Of a file: what else may fail is a RunError already.
            self._end()
            file = Path(error.filename or self.folder.path)
            raise RunError(
                f"cannot start the workers: {explain_write_error(file, error)}"
            ) from None
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        config = self.config
        place = RankInfo(
            rank=rank,
            world_size=config.workers,
            local_rank=rank - self._ranks.start if rank in self._ranks else 0,
            local_world_size=config.nproc_per_node,
            node=config.node_rank,
            nnodes=config.nnodes,
            master_addr=config.master_addr,
            master_port=self._port,
            has_external_store=True,
            restart_count=self._attempt,
        )
        # The first worker shows how it goes; what else is said would only be mixed up.
        return spawn(
            "worker" if rank in self._ranks else "server",
            place,
            [str(self._launch_file), str(self.folder.path), *self._arguments],
            self._output_file(rank),
            shown=rank == 0,
        )

    def watch(self, nodes: NodeCoordinator, interruptions: SignalMonitor) -> Termination | None:
        """Until all workers have ended, here or by a failure anywhere; returns what is known here.

        The first Ctrl-C lets the workers agree on a last iteration; the second ends them.
        """
        while True:
            codes = self.codes()
            if all(code is not None for code in codes.values()):
                return self.termination(codes, interruptions)
            failed = self.has_failed(codes)
            if failed:
                nodes.signal_failure()
            if failed or nodes.failure_signaled():
                return self.termination(self.terminate(), interruptions)
            self._forward(interruptions)
            if len(interruptions.received) > 1:
                return self.termination(self.terminate(0.0), interruptions)
            sleep(POLL_SECONDS)

    def _forward(self, interruptions: SignalMonitor) -> None:
        if interruptions.received and not self._forwarded:
            self._forwarded = interruptions.received[0]
            self.signal(self._forwarded)

    def signal(self, number: Signals) -> None:
        """To all who still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def codes(self) -> dict[int, int | None]:
        """How each process has ended, by rank; None while it runs."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        self._note_failures(codes)
        return codes

    def _note_failures(self, codes: Mapping[int, int | None]) -> None:
        """Give those that failed since the last look their places in the order of failures."""
        new = [rank for rank, code in codes.items() if code and rank not in self._orders]
        if not new:
            return
        order = self._board.next_order() if self._board else 0
        self._orders |= dict.fromkeys(new, order)

    def has_failed(self, codes: Mapping[int, int | None]) -> bool:
        """Whether one has ended that the others cannot go on without.

        One that was asked to stop may be done while another still writes a checkpoint; but where it
        had not begun to train, others may wait for it in vain.
        """
        return any(
            code not in (None, 0, StoppedError.exit_code)
            or (code == StoppedError.exit_code and self.folder.failure_file(rank).exists())
            for rank, code in codes.items()
        )

    def terminate(self, grace_seconds: float = GRACE_SECONDS) -> dict[int, int | None]:
        """Give the others time to write down their part, then end them; who had ended, and how."""
        deadline = monotonic() + grace_seconds
        workers = [self._processes[rank] for rank in self._ranks]
        servers = {
            rank: process for rank, process in self._processes.items() if rank not in self._ranks
        }
        codes: dict[int, int | None] = {}
        while monotonic() < deadline and any(worker.poll() is None for worker in workers):
            self.codes()
            if servers and not codes and monotonic() > deadline - grace_seconds / 2:
                # A server may wait for the one that was lost, and the workers for the server.
                codes = {rank: server.poll() for rank, server in servers.items()}
                for server in servers.values():
                    server.kill()
            sleep(POLL_SECONDS)
        codes = {**self.codes(), **codes}
        self._kill_all()
        return codes

    def termination(
        self, codes: dict[int, int | None], interruptions: SignalMonitor
    ) -> Termination | None:
        """Why the workers did not finish, as far as is known on this node."""
        if not self.folder.path.is_dir():
            cause = f"the run folder {self.folder.path} was removed during the run"
            return Termination(cause, order=self._first_order())
        known = root_cause(self._told_endings())
        if (known and not known.is_secondary) or not any(code != 0 for code in codes.values()):
            return known
        if interruptions.received:
            name = interruptions.received[0].name
            when = "" if known else " before training began"
            cause = f"stopped by {name}{when}"
            order = self._first_order()
            return Termination(cause, StoppedError.exit_code, "stopped", order=order)
        failed = [
            (rank, code, order) for rank, order in self._orders.items() if (code := codes[rank])
        ]
        for rank, code, order in failed:
            if code < 0:
                cause = describe_exit(self._name(rank), code, "")
                return Termination(cause, is_loss=True, order=order)
        for rank, code, order in failed:
            if known is None:
                cause = describe_exit(self._name(rank), code, self._last_line(rank))
                return Termination(cause, order=order)
        busy = [rank for rank in self._ranks if codes[rank] is None]
        if known and busy:
            return replace(known, cause=f"{known.cause}; {format_ranks(busy)} was still busy")
        # Ended from here, because of an alarm: whoever raised it knows more.
        return known or Termination(
            "another node reported a failure without a cause", is_secondary=True
        )

    def _first_order(self) -> int:
        """0 where no failure was counted."""
        return min(filter(None, self._orders.values()), default=0)

    def _told_endings(self) -> list[Termination]:
        """What this node's own processes have reported; of others it knows no order."""
        told = []
        for report in read_reports(self.folder, self._ranks):
            if report.status != "finished":
                order = self._orders.get(report.worker["rank"], 0)
                told.append(replace(Termination.of_report(report), order=order))
        for rank in self._members:
            ending = read_failure(self.folder, rank)
            if ending is None and self._board and rank in self._orders:
                ending = self._board.read(rank)
            if ending:
                told.append(replace(ending, order=self._orders.get(rank, 0)))
        return told

    def _last_line(self, rank: int) -> str:
        """Of what a worker wrote that could not say why it ended."""
        try:
            text = self._output_file(rank).read_text(errors="replace").strip()
        except OSError as error:
            return f"its output cannot be read ({error.strerror})"
        return text.splitlines()[-1] if text else ""

    def _end(self) -> None:
        self._kill_all()
        self.trouble = self._sampler.stop()
        self._launch_file.unlink(missing_ok=True)

    def _kill_all(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()

    def reports(self) -> list[RankReport]:
        """All that are there: this node's, and on the first node those handed in by the others."""
        return read_reports(self.folder, range(self.config.workers))

    def records(self) -> list[str]:
        """The names of the files that belong on the first node."""
        files = self.folder.record_files(self._ranks, [self.config.node_rank])
        return [file.name for file in files if file.exists()]

    def clear_traces(self, reports: bool) -> None:
        """Remove what is only of use between workers and launcher; `reports`: those, too."""
        files = [*map(self.folder.failure_file, self._members)]
        files += map(self._output_file, self._members)
        if reports:
            files += map(self.folder.report_file, range(self.config.workers))
        self.folder.remove_transient(files)

    def discard_records(self) -> None:
        """Remove all that this node has written."""
        files = self.folder.record_files(self._ranks, [self.config.node_rank])
        self.folder.discard([*files, *map(self._output_file, self._members)])

    def _output_file(self, rank: int) -> Path:
        """What a process says besides its records; there only where it said something."""
        name = self._name(rank).removeprefix("rank ").replace(" ", "-")
        return self.folder.output_file(name)

    def _name(self, rank: int) -> str:
        workers = self.config.workers
        return f"rank {rank}" if rank < workers else f"server {rank - workers}"
