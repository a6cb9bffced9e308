"""What is started on each machine of a run: `python -m paceline.launch.node_main`.

The first line of its input is a `NodeTask`; launch/control_channel.py tells how it hangs on its
starter. Loading torch takes seconds, so what can be said before is said before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from paceline import __version__
from paceline.config import RunConfig, from_record
from paceline.errors import ERROR_PREFIX, StoppedError, UsageError
from paceline.launch.control_channel import (
    exit_with_launcher,
    read_given,
    report_errors,
    send_status,
)
from paceline.launch.signals import SIGNALS
from paceline.records import RunFolder
from paceline.training.display import COLUMNS_VARIABLE


@dataclass(frozen=True, slots=True)
class NodeTask:
    version: str
    """Of the starter's paceline."""
    config: dict[str, Any]
    """The run's, as this node has it; or what another command wants to be done."""
    is_resumed: bool
    quiet: bool
    terminal_columns: int | None
    """Of the terminal that shows the first node's output; None where there is none."""

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls) -> NodeTask:
        given = read_given()
        theirs = given.get("version")
        if theirs != __version__:
            raise UsageError(
                f"has paceline {__version__}, and the command that starts it {theirs}: install the"
                " same version on all machines"
            )
        return cls(**given)


def main(run: Callable[[NodeTask], None] | None = None) -> None:
    """Take the task and do it: train, or what `run` does with it."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    task = NodeTask.read()
    send_status(version=__version__)
    exit_with_launcher()
    if task.terminal_columns:
        os.environ[COLUMNS_VARIABLE] = str(task.terminal_columns)
    (run or _train)(task)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """While torch is loaded, which takes seconds, an exception might be lost among its own."""
    sys.stderr.write(f"{ERROR_PREFIX}stopped by {signal.Signals(number).name}\n")
    sys.stderr.flush()
    os._exit(StoppedError.exit_code)


def _train(task: NodeTask) -> None:
    from paceline.launch import launcher
    from paceline.launch.termination import Termination
    from paceline.training.process import keep_freed_memory

    keep_freed_memory()
    config = from_record(task.config)
    outcome = launcher.launch_local(
        config, _resumed(config) if task.is_resumed else None, task.quiet
    )
    send_status(identity=outcome.folder.identity())
    if outcome.exit_code and outcome.result is not None:
        raise Termination(outcome.result["cause"], outcome.exit_code).error()


def _resumed(config: RunConfig) -> RunFolder:
    assert config.name is not None
    # The other nodes get the checkpoint from the first one.
    if config.node_rank:
        return RunFolder.open_or_create(config, config.name)
    return RunFolder.open(Path(config.out) / config.name)


if __name__ == "__main__":
    sys.exit(report_errors(main))
