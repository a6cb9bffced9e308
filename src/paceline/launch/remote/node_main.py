"""Entry point on each machine of a run: `python -m paceline.launch.remote.node_main`.

The first line of its input is a `NodeTask` (control_channel.py). Loading torch takes seconds, so
errors that can be found before are reported before.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paceline import __version__
from paceline.config import RunConfig, from_record
from paceline.errors import ERROR_PREFIX, StoppedError
from paceline.launch.fork_server import ForkServer
from paceline.launch.remote.control_channel import (
    TRAIN,
    LauncherWatch,
    NodeTask,
    report_errors,
    send_status,
)
from paceline.launch.signals import SIGNALS
from paceline.measure.startup import importing
from paceline.records import RunFolder
from paceline.training.display import COLUMNS_VARIABLE


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, _exit_on_signal)
    task = NodeTask.read()
    send_status(version=__version__)
    watch = LauncherWatch()
    if task.terminal_columns:
        os.environ[COLUMNS_VARIABLE] = str(task.terminal_columns)
    if task.program == TRAIN:
        _train(task, watch)
    else:
        importlib.import_module(task.program).run_task(task, watch)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once: while torch loads, an exception might get lost."""
    sys.stderr.write(f"{ERROR_PREFIX}stopped by {signal.Signals(number).name}\n")
    sys.stderr.flush()
    os._exit(StoppedError.exit_code)


def _train(task: NodeTask, watch: LauncherWatch) -> None:
    with importing():
        from paceline.launch import launcher
        from paceline.launch.termination import Termination
        from paceline.training.process import keep_freed_memory

    keep_freed_memory()
    with watch.pausing():
        server = ForkServer.fork()
    config = from_record(task.config)
    with server or nullcontext() as fork_server:
        resumed = _resumed(config) if task.is_resumed else None
        outcome = launcher.launch_local(config, resumed, task.quiet, fork_server)
    send_status(identity=outcome.folder.identity())
    if outcome.exit_code and outcome.result is not None:
        raise Termination(outcome.result["cause"], outcome.exit_code).error()


def _resumed(config: RunConfig) -> RunFolder:
    assert config.name is not None
    # The other nodes get the checkpoint from node 0.
    if config.node_rank:
        return RunFolder.open_or_create(config, config.name)
    return RunFolder.open(Path(config.out) / config.name)


if __name__ == "__main__":
    sys.exit(report_errors(main))
