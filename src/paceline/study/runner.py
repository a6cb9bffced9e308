"""Run the cells of a study that have no result yet, each in its own process.

A cell is done if its folder has the result of a run with the same settings. An interrupted cell
resumes from its newest checkpoint. If its settings changed or it has no readable checkpoint, it
runs again, and the previous run moves to aside/. A cell that fails, crashes or hangs does not
affect the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path

from paceline.config import RunConfig, non_default_values, to_argv
from paceline.config import key as config_key
from paceline.data.manifest import OFFICIAL_SETS, data_folder
from paceline.errors import (
    ERROR_PREFIX,
    CheckpointError,
    ClusterError,
    DamagedCheckpointError,
    NewerSchemaError,
    RecordsError,
    RunError,
    StoppedError,
    UsageError,
)
from paceline.formatting import format_duration
from paceline.launch.fork_server import ForkServer, inheritable_files, start_python
from paceline.launch.signals import SIGNALS
from paceline.records import RunFolder
from paceline.study import duration
from paceline.study.cells import Plan
from paceline.study.clusters import StudyClusters
from paceline.study.folder import DONE, Cell, CellFailure, Study, StudyFolder
from paceline.study.progress import Display
from paceline.training.checkpoint import iterations as checkpointed_iterations
from paceline.training.checkpoint import newest_checkpoint

STOP_SECONDS = 60.0
"""Time for a run to write its last checkpoint and its result after SIGTERM."""
POLL_SECONDS = 0.2

_TRAIN = ("-m", "paceline", "train", "--quiet")
"""Arguments of this Python interpreter."""
LOCATION_FIELDS = ("out", "name", "data_dir", "node_rank", "master_addr", "master_port")
"""Settings that do not affect the result of a run."""


class State(Enum):
    """The state of a cell in its folder."""

    DONE = "done"
    NEW = "new"
    RESUME = "resume"
    RERUN = "again"


@dataclass(slots=True)
class Outcome:
    """The result of one execution of a study."""

    study: Study
    ran: int = 0
    failed: list[Cell] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def exit_code(self) -> int:
        if self.is_stopped:
            return StoppedError.exit_code
        return RunError.exit_code if self.failed else 0


def chosen_cells(plan: Plan, only: str | None) -> list[Cell]:
    """Return the cells to run in order: all, or those whose id matches a pattern."""
    cells = plan.in_running_order()
    if only is None:
        return cells
    pattern = only if any(mark in only for mark in "*?[") else f"*{only}*"
    wanted = {cell.run for cell in plan.study.cells if fnmatchcase(cell.id, pattern)}
    if not wanted:
        raise UsageError(f"--only {only}: no cell has this name; --dry-run lists them")
    return [cell for cell in cells if cell.run in wanted]


def state_of(folder: StudyFolder, cell: Cell, config: RunConfig) -> State:
    """Return the state of a cell; NewerSchemaError if a newer version wrote its records."""
    run = folder.run_folder(cell)
    if not run.path.exists():
        return State.NEW
    try:
        if not same_run(run.read_config(), config):
            return State.RERUN
    except NewerSchemaError:
        raise
    except RecordsError:
        return State.RERUN
    result = run.readable_result()
    if result is not None and result["status"] in DONE:
        return State.DONE
    return State.RESUME if checkpointed_iterations(run.checkpoints) else State.RERUN


def has_readable_checkpoint(run: RunFolder) -> bool:
    """Return False if all checkpoints are missing or damaged, so that no resume can succeed."""
    try:
        return newest_checkpoint(run.checkpoints) is not None
    except DamagedCheckpointError:
        return False
    except CheckpointError:
        return True


def same_run(one: RunConfig, other: RunConfig) -> bool:
    """Return whether two configs are of the same run, also if an older version recorded one."""
    if config_key(one, LOCATION_FIELDS) == config_key(other, LOCATION_FIELDS):
        return True
    one, other = map(_without_auto, (one, other))
    return config_key(one, LOCATION_FIELDS) == config_key(other, LOCATION_FIELDS)


def _without_auto(config: RunConfig) -> RunConfig:
    """Replace auto by the default of older versions, which means the same on a CPU."""
    if config.device != "cpu" and _has_gpu():
        return config
    return dataclasses.replace(
        config,
        precision="fp32" if config.precision == "auto" else config.precision,
        channels_last="off" if config.channels_last == "auto" else config.channels_last,
    )


def merge_previous(plan: Plan, folder: StudyFolder) -> Study:
    """Return the planned study with the durations and failures of cells that did not change."""
    if not StudyFolder.is_study(folder.path):
        return plan.study
    before = folder.read()
    if (before.name, before.scale) != (plan.study.name, plan.study.scale):
        raise UsageError(
            f"{folder.path} has study {before.name} at scale {before.scale}: choose another --out"
        )
    known = {cell.id: cell for cell in before.cells}
    cells = []
    for cell in plan.study.cells:
        old = known.get(cell.id)
        if old is not None and old.settings == cell.settings:
            cell = dataclasses.replace(
                cell, elapsed_seconds=old.elapsed_seconds, trouble=old.trouble
            )
        cells.append(cell)
    return dataclasses.replace(plan.study, cells=tuple(cells))


class Runner:
    """Runs cells one after another; the caller holds the lock of the folder."""

    def __init__(
        self,
        plan: Plan,
        folder: StudyFolder,
        display: Display,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Cells start from `fork_server`, or as new interpreters without one."""
        self._plan, self._folder, self._display = plan, folder, display
        self._fork_server = fork_server
        self._clusters = StudyClusters()
        self._outcome = Outcome(merge_previous(plan, folder))

    def run(self, only: str | None = None) -> Outcome:
        cells = chosen_cells(self._plan, only)
        self._folder.write(self._outcome.study)
        pending = [cell for cell in cells if not self._is_settled(cell)]
        try:
            with self._display, _signals_as_interrupts(), self._clusters:
                for number, cell in enumerate(pending):
                    self._run_cell(cell, number + 1, pending)
        except KeyboardInterrupt:
            self._outcome.is_stopped = True
        except OSError as error:
            path = error.filename or self._folder.path
            raise RecordsError(f"cannot write to {path}: {error.strerror}") from None
        self._outcome.failed = self._with_failure(cells, "failed")
        self._outcome.skipped = self._with_failure(cells, "skipped")
        return self._outcome

    def _with_failure(self, chosen: list[Cell], status: str) -> list[Cell]:
        runs = {cell.run for cell in chosen}
        return [
            cell
            for cell in self._outcome.study.cells
            if cell.id in runs and cell.trouble is not None and cell.trouble.status == status
        ]

    def _is_settled(self, cell: Cell) -> bool:
        """Return whether a cell is done or cannot run here; records its failure."""
        config = self._plan.configs[cell.id]
        try:
            is_done = state_of(self._folder, cell, config) is State.DONE
        except NewerSchemaError as error:
            self._record(cell, trouble=CellFailure("failed", str(error)))
            return True
        if is_done:
            self._record(cell, trouble=None)
            return True
        reason = missing_requirement(config)
        if reason is not None:
            self._record(cell, trouble=CellFailure("skipped", reason))
        return reason is not None

    def _run_cell(self, cell: Cell, number: int, pending: list[Cell]) -> None:
        known = self._outcome.study.cells
        own = duration.seconds_of(cell, known)
        others = duration.seconds_of_all(pending[number:], known)

        def left(spent: float) -> float | None:
            return None if others is None or own is None else others + max(0.0, own - spent)

        self._display.begin(cell.id, number, len(pending), left(0.0))
        # The previous failure no longer applies, even if this attempt is interrupted.
        self._record(cell, trouble=None)
        begin = time.monotonic()
        is_whole = state_of(self._folder, cell, self._plan.configs[cell.id]) is not State.RESUME
        trouble = self._attempt(cell, lambda spent: self._display.tick(spent, left(spent)))
        spent = time.monotonic() - begin
        self._outcome.ran += 1
        self._record(
            cell, trouble=trouble, elapsed_seconds=spent if is_whole and not trouble else None
        )
        status = trouble.status if trouble else self._folder.status(cell)
        self._display.end(cell.id, status, spent, trouble.cause if trouble else "")

    def _attempt(self, cell: Cell, tick: Callable[[float], None]) -> CellFailure | None:
        """Run a cell to its end; returns its failure, if any."""
        folder = self._folder.run_folder(cell)
        config = dataclasses.replace(
            self._plan.configs[cell.id], out=str(self._folder.cells), name=cell.run
        )
        state = state_of(self._folder, cell, self._plan.configs[cell.id])
        if state is State.RESUME:
            trouble, code = self._run_command(cell, resume_argv(folder.path), tick)
            # The same exit code also means errors that the user can fix: then the run is kept.
            if code != UsageError.exit_code or has_readable_checkpoint(folder):
                return trouble
            state = State.RERUN
        if state is State.RERUN:
            try:
                with folder.locked():
                    _set_aside(folder.path, self._folder.aside)
            except UsageError as error:
                return CellFailure("failed", str(error))
        return self._run_command(cell, train_argv(config), tick)[0]

    def _run_command(
        self, cell: Cell, argv: list[str], tick: Callable[[float], None]
    ) -> tuple[CellFailure | None, int | None]:
        limit = self._plan.time_limit_seconds
        log = self._folder.log_file(cell)
        try:
            variables = self._clusters.variables(self._plan.configs[cell.id])
        except ClusterError as error:
            return CellFailure("failed", str(error)), None
        process = CellProcess(argv, log, self._fork_server, variables)
        try:
            code = process.wait(limit, tick)
        finally:
            process.stop()
        if code is None:
            clock = format_duration(limit)
            return CellFailure("failed", f"stopped after the time limit of {clock}"), code
        return self._failure(cell, code, log), code

    def _failure(self, cell: Cell, code: int, log: Path) -> CellFailure | None:
        try:
            result = self._folder.result(cell)
        except RecordsError as error:
            return CellFailure("failed", str(error))
        if result is not None and result["status"] in DONE:
            return None
        cause = str(result["cause"] or "") if result is not None else ""
        return CellFailure("failed", cause or last_error_line(log) or f"exit code {code}")

    def _record(
        self, cell: Cell, *, trouble: CellFailure | None, elapsed_seconds: float | None = None
    ) -> None:
        """Save the failure and duration of a run, for all cells that share it."""
        study = self._outcome.study
        cells = tuple(
            other
            if other.run != cell.run
            else dataclasses.replace(
                other, trouble=trouble, elapsed_seconds=elapsed_seconds or other.elapsed_seconds
            )
            for other in study.cells
        )
        if cells != study.cells:
            self._outcome.study = dataclasses.replace(study, cells=cells)
            self._folder.write(self._outcome.study)


def _set_aside(path: Path, aside: Path) -> None:
    aside.mkdir(parents=True, exist_ok=True)
    names = (aside / f"{path.name}~{number}" for number in count(1))
    path.rename(next(name for name in names if not name.exists()))


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Let SIGINT and SIGTERM stop the study, even if a shell started it with SIGINT ignored."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def train_argv(config: RunConfig) -> list[str]:
    """Return Python's arguments for `paceline train` with this config."""
    return [*_TRAIN, *to_argv(non_default_values(config))]


def resume_argv(folder: Path) -> list[str]:
    return [*_TRAIN, "--resume", str(folder)]


class CellProcess:
    """A Python process with its output in a file; it does not outlive this process.

    Its session is its own: Ctrl-C reaches only this process, which forwards it.
    """

    def __init__(
        self,
        argv: list[str],
        log: Path,
        fork_server: ForkServer | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = start_python(
                fork_server,
                argv,
                name="paceline train",
                environment={**os.environ, **(variables or {})},
                stdout=output.fileno(),
                stderr=output.fileno(),
                # Not killed: the run stops its workers and machines, and writes its records.
                death_signal=signal.SIGTERM,
                # The lock of the study is the only inheritable file.
                inherited=inheritable_files(),
            )

    def wait(self, limit_seconds: float, tick: Callable[[float], None]) -> int | None:
        """Return the exit code, or None after the limit; calls `tick` with the elapsed seconds."""
        begin = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(POLL_SECONDS)
            spent = time.monotonic() - begin
            if spent > limit_seconds:
                return None
            tick(spent)

    def stop(self) -> None:
        """Send SIGTERM, and kill what is left of the process group after STOP_SECONDS."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
        finally:
            # Also after a second Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def last_error_line(log: Path) -> str:
    """Return the first error line of a log, else its last line; may be empty."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    chosen = errors or [line.strip() for line in lines if line.strip()][-1:]
    return chosen[0][:300] if chosen else ""


def missing_requirement(config: RunConfig) -> str | None:
    """Return why this machine cannot run a config; None if no reason is known."""
    if config.cluster is not None and (reason := _emulation_error()):
        return f"no emulated cluster: {reason}"
    if config.device == "cuda" and not _has_gpu():
        return "no GPU that torch can use"
    return _missing_data(config)


def _missing_data(config: RunConfig) -> str | None:
    dataset = OFFICIAL_SETS.get(config.data)
    folder = data_folder(config.data_dir)
    # Other hosts have their own data folders.
    if dataset is None or config.hosts or dataset.is_in(folder):
        return None
    return f"{config.data} is not in {folder}: paceline data fetch {config.data}"


@cache
def _emulation_error() -> str | None:
    from paceline.emulation.namespaces import can_be_root

    try:
        can_be_root()
    except ClusterError as error:
        return str(error)
    return None


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
