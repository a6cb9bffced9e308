"""What this machine cannot run, told before a cell is started.

A cell as a command of its own: its words, and a process that can be stopped.

A process for each cell, so that one that crashes, hangs or leaks takes nothing with it.

Run the cells of a study that have no result yet, each as a process of its own.

A cell is done when its folder holds the result of a run with just these settings. One that was
interrupted goes on from its newest checkpoint; one whose settings changed, or that has no readable
checkpoint, is run anew, and what was there is kept aside. One that fails stops nobody else."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path

from paceline.child_process import tied_command
from paceline.config import RunConfig, non_default_values, to_argv
from paceline.data.manifest import OFFICIAL_SETS, data_folder
from paceline.errors import (
    ERROR_PREFIX,
    CheckpointError,
    ClusterError,
    DamagedCheckpointError,
    NewerSchemaError,
    RecordsError,
    UsageError,
)
from paceline.launch.signals import SIGNALS
from paceline.records import RunFolder
from paceline.study import duration
from paceline.study.cells import Plan
from paceline.study.folder import DONE, Cell, CellFailure, Study, StudyFolder
from paceline.study.progress import Display
from paceline.training.checkpoint import iterations as checkpointed_iterations
from paceline.training.checkpoint import newest_checkpoint


def missing_requirement(config: RunConfig) -> str | None:
    """Why a run cannot be done here; None: nothing is known to be in its way."""
    if config.cluster is not None and (reason := _without_clusters()):
        return f"no emulated cluster: {reason}"
    if config.device == "cuda" and not _has_gpu():
        return "no GPU that torch can use"
    return _missing_data(config)


def _missing_data(config: RunConfig) -> str | None:
    """What other hosts have is theirs to know."""
    known = OFFICIAL_SETS.get(config.data)
    folder = data_folder(config.data_dir)
    if known is None or config.hosts or known.is_in(folder):
        return None
    return f"{config.data} is not in {folder}: paceline data fetch {config.data}"


@cache
def _without_clusters() -> str | None:
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


STOP_SECONDS = 60.0
"""What a run gets to write its last checkpoint and its account when it is asked to stop."""
POLL_SECONDS = 0.2

_TRAIN = ("-m", "paceline", "train", "--quiet")
"""What Python is given, so that it is the Python and the paceline of this process."""


def train_words(config: RunConfig) -> list[str]:
    """Python's arguments for `paceline train` with this config."""
    return [*_TRAIN, *to_argv(non_default_values(config))]


def resume_words(folder: Path) -> list[str]:
    return [*_TRAIN, "--resume", str(folder)]


class CellProcess:
    """A Python program whose output goes to a file; it does not outlive this process."""

    def __init__(self, words: list[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                # Not killed: the run stops its workers and machines, and writes its records.
                tied_command(signal.SIGTERM, [sys.executable, *words]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # In a group of its own: Ctrl-C reaches this process alone, which passes it on once.
                start_new_session=True,
                # The study's lock is the only one that may be inherited.
                close_fds=False,
            )

    def wait(self, limit_seconds: float, tick: Callable[[float], None]) -> int | None:
        """The exit code, or None where the limit passed; `tick` is told the seconds so far."""
        begin = time.monotonic()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(POLL_SECONDS)
            spent = time.monotonic() - begin
            if spent > limit_seconds:
                return None
            tick(spent)

    def stop(self) -> None:
        """Ask the run to stop, and end it where it does not; nothing of it is left."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_SECONDS)
        finally:
            # The whole group: a second Ctrl-C comes through here as well.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def last_error_line(log: Path) -> str:
    """What a command's output gives as the reason of its failure, in a line; may be empty."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    told = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    said = told or [line.strip() for line in lines if line.strip()][-1:]
    return said[0][:300] if said else ""


WHERE_NOT_WHAT = ("out", "name", "data_dir", "node_rank", "master_addr", "master_port")
"""Settings that say where a run happens and are no reason to run it again."""


class State(Enum):
    """What is to be done about a cell."""

    DONE = "done"
    NEW = "new"
    RESUME = "resume"
    RERUN = "again"


@dataclass(slots=True)
class Outcome:
    """How a study went this time."""

    study: Study
    ran: int = 0
    failed: list[Cell] = field(default_factory=list)
    skipped: list[Cell] = field(default_factory=list)
    is_stopped: bool = False

    @property
    def exit_code(self) -> int:
        if self.is_stopped:
            return 130
        return 1 if self.failed else 0


def chosen_cells(plan: Plan, only: str | None) -> list[Cell]:
    """The runs to make, in order: all, or those of the cells that a pattern means."""
    cells = plan.in_running_order()
    if only is None:
        return cells
    pattern = only if any(mark in only for mark in "*?[") else f"*{only}*"
    wanted = {cell.run for cell in plan.study.cells if fnmatchcase(cell.id, pattern)}
    if not wanted:
        raise UsageError(f"--only {only}: no cell is called so; --dry-run shows their names")
    return [cell for cell in cells if cell.run in wanted]


def state_of(folder: StudyFolder, cell: Cell, config: RunConfig) -> State:
    """What the folder holds of a cell; a NewerSchemaError if only a newer version can tell."""
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
    """False only where all checkpoints are missing or damaged, so that no resume can succeed."""
    try:
        return newest_checkpoint(run.checkpoints) is not None
    except DamagedCheckpointError:
        return False
    except CheckpointError:
        return True


def same_run(one: RunConfig, other: RunConfig) -> bool:
    first, second = one.to_dict(), other.to_dict()
    return all(first[key] == second[key] for key in first if key not in WHERE_NOT_WHAT)


def merge_previous(plan: Plan, folder: StudyFolder) -> Study:
    """The planned study with what earlier runners wrote down about cells that did not change."""
    if not StudyFolder.is_study(folder.path):
        return plan.study
    before = folder.read()
    if (before.name, before.scale) != (plan.study.name, plan.study.scale):
        raise UsageError(
            f"{folder.path} holds study {before.name} at scale {before.scale}: give another --out"
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
    """Runs cells one after the other; the folder's lock must be held."""

    def __init__(self, plan: Plan, folder: StudyFolder, display: Display) -> None:
        self._plan, self._folder, self._display = plan, folder, display
        self._outcome = Outcome(merge_previous(plan, folder))

    def run(self, only: str | None = None) -> Outcome:
        cells = chosen_cells(self._plan, only)
        self._folder.write(self._outcome.study)
        waiting = [cell for cell in cells if not self._is_settled(cell)]
        try:
            with self._display, _signals_as_interrupts():
                for number, cell in enumerate(waiting):
                    self._run_cell(cell, number + 1, waiting)
        except KeyboardInterrupt:
            self._outcome.is_stopped = True
        except OSError as error:
            place = error.filename or self._folder.path
            raise RecordsError(f"cannot write to {place}: {error.strerror}") from None
        self._outcome.failed = self._troubled(cells, "failed")
        self._outcome.skipped = self._troubled(cells, "skipped")
        return self._outcome

    def _troubled(self, chosen: list[Cell], status: str) -> list[Cell]:
        runs = {cell.run for cell in chosen}
        return [
            cell
            for cell in self._outcome.study.cells
            if cell.id in runs and cell.trouble is not None and cell.trouble.status == status
        ]

    def _is_settled(self, cell: Cell) -> bool:
        """Whether a cell needs no process: it is done, or it cannot be run here."""
        config = self._plan.configs[cell.id]
        try:
            is_done = state_of(self._folder, cell, config) is State.DONE
        except NewerSchemaError as error:
            self._note(cell, trouble=CellFailure("failed", str(error)))
            return True
        if is_done:
            self._note(cell, trouble=None)
            return True
        reason = missing_requirement(config)
        if reason is not None:
            self._note(cell, trouble=CellFailure("skipped", reason))
        return reason is not None

    def _run_cell(self, cell: Cell, number: int, waiting: list[Cell]) -> None:
        known = self._outcome.study.cells
        own = duration.seconds_of(cell, known)
        others = duration.seconds_of_all(waiting[number:], known)

        def left(spent: float) -> float | None:
            return None if others is None or own is None else others + max(0.0, own - spent)

        self._display.begin(cell.id, number, len(waiting), left(0.0))
        # What went wrong the last time is no longer so, also if this one is interrupted.
        self._note(cell, trouble=None)
        begin = time.monotonic()
        is_whole = state_of(self._folder, cell, self._plan.configs[cell.id]) is not State.RESUME
        trouble = self._attempt(cell, lambda spent: self._display.tick(spent, left(spent)))
        spent = time.monotonic() - begin
        self._outcome.ran += 1
        self._note(
            cell, trouble=trouble, elapsed_seconds=spent if is_whole and not trouble else None
        )
        status = trouble.status if trouble else self._folder.status(cell)
        self._display.end(cell.id, status, spent, trouble.cause if trouble else "")

    def _attempt(self, cell: Cell, tick: Callable[[float], None]) -> CellFailure | None:
        """Run a cell to its end; tells what went wrong, if anything did."""
        folder = self._folder.run_folder(cell)
        config = dataclasses.replace(
            self._plan.configs[cell.id], out=str(self._folder.cells), name=cell.run
        )
        state = state_of(self._folder, cell, self._plan.configs[cell.id])
        if state is State.RESUME:
            trouble, code = self._run_command(cell, resume_words(folder.path), tick)
            # The same exit code may mean anything that the user can fix: then the run is kept.
            if code != UsageError.exit_code or has_readable_checkpoint(folder):
                return trouble
            state = State.RERUN
        if state is State.RERUN:
            try:
                with folder.locked():
                    _set_aside(folder.path, self._folder.aside)
            except UsageError as error:
                return CellFailure("failed", str(error))
        return self._run_command(cell, train_words(config), tick)[0]

    def _run_command(
        self, cell: Cell, words: list[str], tick: Callable[[float], None]
    ) -> tuple[CellFailure | None, int | None]:
        limit = self._plan.time_limit_seconds
        log = self._folder.log_file(cell)
        process = CellProcess(words, log)
        try:
            code = process.wait(limit, tick)
        finally:
            process.stop()
        if code is None:
            clock = duration.format_duration(limit)
            return CellFailure("failed", f"stopped after its time limit of {clock}"), code
        return self._trouble(cell, code, log), code

    def _trouble(self, cell: Cell, code: int, log: Path) -> CellFailure | None:
        try:
            result = self._folder.result(cell)
        except RecordsError as error:
            return CellFailure("failed", str(error))
        if result is not None and result["status"] in DONE:
            return None
        cause = str(result["cause"] or "") if result is not None else ""
        return CellFailure(
            "failed", cause or last_error_line(log) or f"ended with exit code {code}"
        )

    def _note(
        self, cell: Cell, *, trouble: CellFailure | None, elapsed_seconds: float | None = None
    ) -> None:
        """Write down what is known of a run, for all cells that are this run."""
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
    """Have both signals stop the study, also where a shell had it started with Ctrl-C ignored."""
    before = [signal.signal(number, signal.default_int_handler) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
