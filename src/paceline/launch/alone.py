"""One worker, in this process."""

from __future__ import annotations

import os

from paceline.comm import in_process
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import RunConfig
from paceline.errors import ConfigError, UsageError
from paceline.launch.result import RunOutcome, write_result
from paceline.measure.phase_clock import PhaseClock
from paceline.measure.sampler import ResourceSampler
from paceline.records import RunFolder
from paceline.training.checkpoint import CheckpointStore
from paceline.training.display import open_display
from paceline.training.run_state import check_fits
from paceline.training.trainer import Prepared, RankContext, check_work_is_left, prepare, run_worker


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    clock = PhaseClock()
    clock.startup.begin("model")
    folder = resumed or RunFolder.create(config)
    with folder.locked():
        try:
            prepared = prepare(config, startup=clock.startup)
        except BaseException:
            # Nothing was trained: a refused run leaves no trace, and its name stays free.
            if resumed is None:
                folder.discard()
            raise
        return _train(config, folder, prepared, resumed is not None, quiet, clock)


def _train(
    config: RunConfig,
    folder: RunFolder,
    prepared: Prepared,
    resumed: bool,
    quiet: bool,
    clock: PhaseClock,
) -> RunOutcome:
    store = CheckpointStore(folder.checkpoints, config.checkpoint_keep, config.checkpoint_mode)
    checkpoint = store.newest() if resumed else None
    if checkpoint:
        check_fits(checkpoint.state, config, prepared.model)
        check_work_is_left(config, prepared, checkpoint, folder.is_finished)
    if resumed:
        folder.change_config(config)
    folder.archive_result()
    sampler = ResourceSampler(
        folder.resources_file(0), [os.getpid()], node=0, interval_seconds=config.sample_seconds
    )
    communicator = in_process.single()
    try:
        sampler.start()
        team = RankContext(SINGLE_PROCESS, communicator, store)
        report = run_worker(config, folder, prepared, team, checkpoint, open_display(quiet), clock)
    finally:
        trouble = sampler.stop()
        communicator.close()
    if report.exit_code == UsageError.exit_code and not resumed and not report.iterations:
        # The strategy refused what it saw of the model.
        folder.discard(folder.record_files([0], [0]))
        raise ConfigError.from_text(report.cause or "")
    if trouble:
        report.warnings.append(trouble)
    result = write_result(config, folder, [report])
    return RunOutcome(folder, result, report.exit_code)
