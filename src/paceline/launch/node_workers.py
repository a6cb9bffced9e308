"""The workers and parameter servers of one node, with their records and the resource sampler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Self

from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.errors import RunError, StoppedError
from paceline.formatting import format_ranks
from paceline.launch.fork_server import ForkServer
from paceline.launch.processes import GRACE_SECONDS, LocalProcesses
from paceline.launch.record_collection import read_reports
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import FailureBoard, Termination, root_cause
from paceline.measure.sampler import ResourceSampler
from paceline.records import SCHEMA, RunFolder, explain_write_error, write_json
from paceline.training.rank_report import RankReport


class NodeWorkers:
    """Runs the processes of a node for the duration of the block."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        port: int,
        resumed: bool,
        quiet: bool,
        attempt: int = 0,
        board: FailureBoard | None = None,
        servers: Sequence[int] = (),
        fork_server: ForkServer | None = None,
    ) -> None:
        """`attempt` separates the restarts of a run at the same store.

        `board` orders failures across nodes; without one, clocks do. `servers` are the ranks of
        this node's parameter servers.
        """
        self.folder = folder
        self.sampler_warning: str | None = None
        """Why resources were not sampled, if so."""
        self.config = config
        self._port = port
        self._attempt = attempt
        self._arguments = ["resumed" if resumed else "new", "quiet" if quiet else "shown"]
        self._launch_file = folder.launch_file(config.node_rank)
        first_rank = config.node_rank * config.nproc_per_node
        self._ranks = range(first_rank, first_rank + config.nproc_per_node)
        self._servers = servers
        self._process_ranks = [*self._ranks, *servers]
        self._processes = LocalProcesses(folder, config.workers, board, fork_server)
        self._sampler = ResourceSampler(
            folder.resources_file(config.node_rank),
            [os.getpid()],
            node=config.node_rank,
            interval_seconds=config.sample_seconds,
        )

    def __enter__(self) -> Self:
        try:
            self.remove_transient(reports=True)
            write_json(self._launch_file, {"schema": SCHEMA, "config": self.config.to_dict()})
            for rank in self._process_ranks:
                self._start(rank)
            self._sampler.start()
        except OSError as error:
            # Concerns a file: other failures are RunErrors.
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

    def _start(self, rank: int) -> None:
        config = self.config
        rank_info = RankInfo(
            rank=rank,
            world_size=config.workers,
            local_rank=rank - self._ranks.start if rank in self._ranks else 0,
            local_world_size=config.nproc_per_node,
            node_rank=config.node_rank,
            nnodes=config.nnodes,
            master_addr=config.master_addr,
            master_port=self._port,
            has_external_store=True,
            restart_count=self._attempt,
        )
        program = "worker" if rank in self._ranks else "server"
        arguments = [str(self._launch_file), str(self.folder.path), *self._arguments]
        self._processes.start(program, rank_info, arguments)

    def codes(self) -> dict[int, int | None]:
        """The exit code of each process by rank; None while it runs."""
        return self._processes.codes()

    def signal(self, number: Signals) -> None:
        """Send a signal to all processes that still run."""
        self._processes.signal(number)

    def has_failed(self, codes: Mapping[int, int | None]) -> bool:
        """Whether a process has ended that the others cannot continue without.

        A worker that was asked to stop may end while another still writes a checkpoint; but if it
        had not begun to train, others may wait for it until they time out.
        """
        return any(
            code not in (None, 0, StoppedError.exit_code)
            or (code == StoppedError.exit_code and self.folder.failure_file(rank).exists())
            for rank, code in codes.items()
        )

    def terminate(self, grace_seconds: float = GRACE_SECONDS) -> dict[int, int | None]:
        """Give workers time to write their records, then kill them; their exit codes before."""
        return self._processes.terminate(grace_seconds, self._servers)

    def termination(
        self, codes: dict[int, int | None], signals: SignalMonitor
    ) -> Termination | None:
        """Why the workers did not finish, as far as this node knows."""
        if not self.folder.path.is_dir():
            cause = f"the run folder {self.folder.path} was removed during the run"
            return Termination(cause, order=self._first_order())
        known = root_cause(self._reported())
        if (known and not known.is_secondary) or not any(code != 0 for code in codes.values()):
            return known
        if signals.received:
            name = signals.received[0].name
            when = "" if known else " before training began"
            cause = f"stopped by {name}{when}"
            order = self._first_order()
            return Termination(cause, StoppedError.exit_code, "stopped", order=order)
        cause_here = self._processes.exit_cause(codes, known)
        if cause_here != known:
            return cause_here
        busy = [rank for rank in self._ranks if codes[rank] is None]
        if known and busy:
            return replace(known, cause=f"{known.cause}; {format_ranks(busy)} was still busy")
        # This node ended them because another node, which knows the cause, signaled a failure.
        return known or Termination(
            "another node reported a failure without a cause", is_secondary=True
        )

    def _first_order(self) -> int:
        """0 if no failure was counted."""
        return min(filter(None, self._processes.failure_orders.values()), default=0)

    def _reported(self) -> list[Termination]:
        """What this node's processes reported; the order of other nodes' failures is unknown."""
        orders = self._processes.failure_orders
        unfinished = [
            replace(Termination.of_report(report), order=orders.get(report.worker["rank"], 0))
            for report in read_reports(self.folder, self._ranks)
            if report.status != "finished"
        ]
        return unfinished + self._processes.reported_failures()

    def _end(self) -> None:
        self._processes.kill()
        self.sampler_warning = self._sampler.stop()
        self._launch_file.unlink(missing_ok=True)

    def reports(self) -> list[RankReport]:
        """The existing reports; on node 0 also those of the other nodes."""
        return read_reports(self.folder, range(self.config.workers))

    def records(self) -> list[str]:
        """Names of the existing files to send to node 0."""
        files = self.folder.record_files(self._ranks, [self.config.node_rank])
        return [file.name for file in files if file.exists()]

    def remove_transient(self, reports: bool) -> None:
        """Remove this node's transient files; `reports`: the reports as well."""
        files = [*map(self.folder.failure_file, self._process_ranks)]
        files += map(self._processes.output_file, self._process_ranks)
        if reports:
            files += map(self.folder.report_file, range(self.config.workers))
        self.folder.remove_transient(files)

    def files(self) -> list[Path]:
        """All files that this node's processes write."""
        records = self.folder.record_files(self._ranks, [self.config.node_rank])
        return [*records, *map(self._processes.output_file, self._process_ranks)]
