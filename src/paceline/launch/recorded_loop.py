"""The records of a user's own training loop: the run folder that `paceline train` writes, too.

Whatever ends the loop, the records say so. An exception continues to the user's program.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig, RunSettings
from paceline.errors import PacelineError, RunError, StoppedError
from paceline.launch.consistency import agree_on_folder, shares_first_folder
from paceline.launch.record_collection import (
    cleans_folder,
    collect_records,
    collect_reports,
    write_report,
)
from paceline.launch.result import first_cause, write_result
from paceline.launch.worker import sampler_for
from paceline.records import RunFolder, default_name
from paceline.training.rank_report import RankReport, explain
from paceline.training.session import Session


def settings_of_loop(config: RunConfig, argv: Sequence[str]) -> RunSettings:
    """What is known of the settings of a loop; `argv` are the program and its arguments."""
    return RunSettings(
        "join",
        {
            **({"command": list(argv)} if argv and argv[0] else {}),
            "strategy": config.strategy,
            "options": dict(config.options),
            "communicator": config.communicator,
            "world_size": config.workers,
            "nnodes": config.nnodes,
        },
    )


class RecordedLoop:
    """Context manager that records a session, on all its ranks; entering it is collective."""

    def __init__(
        self,
        session: Session,
        config: RunConfig,
        settings: RunSettings,
        rank_info: RankInfo,
        out: Path,
        name: str | None,
    ) -> None:
        self._session = session
        self._config = config
        self._settings = settings
        self._rank_info = rank_info
        self._out = out
        self._name = name

    def __enter__(self) -> Self:
        communicator = self._session.communicator
        with ExitStack() as stack:
            self._folder = agree_on_folder(
                communicator,
                stack,
                self._create,
                lambda name: RunFolder.open_or_create_at(self._out / name, self._settings),
            )
            self._shares_folder = shares_first_folder(self._folder, communicator)
            self._termination = stack.enter_context(_TerminationSignal())
            self._stack = stack.pop_all()
        self._session.folder = self._folder
        self._sampler = sampler_for(self._config, self._folder, self._rank_info)
        self._sampler.start()
        return self

    def _create(self) -> RunFolder:
        script = Path(self._settings.script or "loop").stem
        name = self._name or default_name(self._out, script, self._config.strategy)
        out = f"out={str(self._out)!r}"
        return RunFolder.create_at(self._out / name, self._settings, out=out, name="name")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            self._termination.is_deferred = True
            try:
                self._end(error)
            except (RunError, OSError) as failure:
                # Training goes on without records.
                sys.stderr.write(f"paceline: the records are incomplete: {failure}\n")

    def _end(self, error: BaseException | None) -> None:
        status = ("finished", None, 0) if error is None else explain(_as_known(error), self._folder)
        report = self._session.report(*status)
        if warning := self._sampler.stop():
            self._session.warnings.append(warning)
        if report is None:
            # Nothing was trained.
            if cleans_folder(self._rank_info, self._shares_folder):
                ranks, nodes = self._rank_info.world_size, self._rank_info.nnodes
                self._folder.discard(self._folder.record_files(range(ranks), range(nodes)))
            return
        is_consequence = isinstance(error, PacelineError) and error.is_secondary
        report.is_secondary = is_consequence or isinstance(error, _TerminatedError)
        reports = self._collect(report)
        if reports is not None:
            write_result(self._settings, self._folder, reports, first_cause(reports))
            sys.stderr.write(f"paceline: records in {self._folder.path}\n")

    def _collect(self, report: RankReport) -> list[RankReport] | None:
        """The reports of all ranks on rank 0; None on the others."""
        rank_info, folder = self._rank_info, self._folder
        if rank_info.world_size == 1:
            return [report]
        write_report(folder, rank_info.rank, report)
        reports = collect_records(
            folder, rank_info, self._session.communicator, report, self._shares_folder
        )
        if reports is None and rank_info.rank == 0:
            reports = collect_reports(folder, rank_info.world_size, expected=rank_info.world_size)
        return reports


class _TerminatedError(BaseException):
    """SIGTERM, as an exception that the user's program does not handle by accident."""


class _TerminationSignal:
    """Lets SIGTERM, which torchrun sends when another worker fails, end a block by an exception.

    After the block the process ends by the signal, as it would have without a handler. A handler of
    the user's program stays.
    """

    def __init__(self) -> None:
        self.is_deferred = False
        """Set while records are written, which take a moment."""
        self._is_received = False
        self._is_installed = False

    def __enter__(self) -> Self:
        # Python allows handlers only in the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._is_received:
                signal.raise_signal(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if not self._is_received and not self.is_deferred:
            self._is_received = True
            raise _TerminatedError
        self._is_received = True


def _as_known(error: BaseException) -> BaseException:
    """The error as `explain` names it."""
    if isinstance(error, _TerminatedError):
        return StoppedError("stopped by SIGTERM")
    if isinstance(error, SystemExit) and not error.code:
        return StoppedError("the program ended inside the block of paceline.join")
    return error
