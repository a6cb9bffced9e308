"""A run on this machine, in this process: one worker."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from paceline.config import RunConfig, fields, flag_of, from_mapping, option_of
from paceline.errors import CheckpointError, ConfigError, PacelineError, RecordsError, UsageError
from paceline.launch.result import assemble
from paceline.measure.clock import PhaseClock
from paceline.measure.sampler import ResourceSampler
from paceline.records import Result, RunFolder
from paceline.sync import STRATEGIES
from paceline.worker.checkpoint import Checkpoint, CheckpointStore
from paceline.worker.display import Display
from paceline.worker.run import Prepared, prepare, run_worker


def train(config: RunConfig, display: Display) -> tuple[RunFolder, Result, int]:
    """Run a config in a new folder; returns the folder, the result and the exit code."""
    clock = PhaseClock()
    check_world(config)
    folder = RunFolder.create(config)
    try:
        prepared = prepare(config)
    except BaseException as error:
        # Nothing was trained: a refused run leaves no trace, and its name stays free.
        if isinstance(error, UsageError | KeyboardInterrupt):
            folder.discard()
        raise
    return _run(config, folder, prepared, _store(config, folder), None, display, clock)


def resume(path: str, changes: dict[str, Any], display: Display) -> tuple[RunFolder, Result, int]:
    """Go on with a run from its newest checkpoint; `changes` are flags given with --resume."""
    clock = PhaseClock()
    folder = RunFolder.open(path)
    config = resumed_config(folder.read_config(), changes, folder)
    before = folder.read_result()
    if before is not None and before["status"] == "finished" and not changes:
        raise RecordsError(f"{path} is finished: give more --epochs or --iterations to go on")
    store = _store(config, folder)
    checkpoint = store.newest()
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint: it was run without --checkpoint-every")
    prepared = prepare(config)
    _set_result_aside(folder)
    return _run(config, folder, prepared, store, checkpoint, display, clock)


def resumed_config(original: RunConfig, changes: dict[str, Any], folder: RunFolder) -> RunConfig:
    """The original config with the changes that a resumed run may make; others are refused."""
    # The folder may have been moved or be named from elsewhere since.
    values = {**original.to_dict(), "out": str(folder.path.parent), "name": folder.id}
    for budget, other in (("epochs", "iterations"), ("iterations", "epochs")):
        if budget in changes and other not in changes:
            values[other] = None
    changed = from_mapping({**values, **changes})
    problems = [
        f"{flag_of(item.name)}: a resumed run keeps its {getattr(original, item.name)!r},"
        f" got {getattr(changed, item.name)!r}"
        for item in fields()
        if item.name in changes
        and not option_of(item).may_change
        and getattr(changed, item.name) != getattr(original, item.name)
    ]
    if problems:
        raise ConfigError(problems)
    return changed


def check_world(config: RunConfig) -> None:
    """Refuse a strategy that cannot keep so many workers in step."""
    most = STRATEGIES.load(config.strategy).most_workers if config.strategy in STRATEGIES else None
    if most is not None and config.workers > most:
        raise ConfigError(
            [f"--strategy {config.strategy}: trains {most} worker, not {config.workers}"]
        )


def _store(config: RunConfig, folder: RunFolder) -> CheckpointStore:
    return CheckpointStore(folder.checkpoints, config.checkpoint_keep, config.checkpoint_mode)


def _run(
    config: RunConfig,
    folder: RunFolder,
    prepared: Prepared,
    store: CheckpointStore,
    checkpoint: Checkpoint | None,
    display: Display,
    clock: PhaseClock,
) -> tuple[RunFolder, Result, int]:
    sampler = ResourceSampler(
        folder.resources_file(0), [os.getpid()], node=0, interval_seconds=config.sample_seconds
    )
    if config.sample_seconds:
        sampler.start()
    try:
        report = run_worker(config, folder, prepared, store, checkpoint, display, clock)
    finally:
        trouble = sampler.stop() if config.sample_seconds else None
    if trouble:
        report = dataclasses.replace(report, warnings=[*report.warnings, trouble])
    result = assemble(config, folder, [report])
    try:
        folder.write_result(result)
    except OSError as error:
        raise PacelineError(f"cannot write {folder.result_file}: {error.strerror}") from None
    return folder, result, report.exit_code


def _set_result_aside(folder: RunFolder) -> None:
    """Keep what an earlier part of the run said about itself."""
    if folder.result_file.exists():
        free = (Path(f"{folder.result_file.with_suffix('')}-{n}.json") for n in itertools.count(1))
        folder.result_file.rename(next(path for path in free if not path.exists()))
