"""`paceline train`: one run."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from paceline.cli.config_flags import add_config_flags, add_control_flags, given_flags
from paceline.config import from_mapping
from paceline.errors import StoppedError
from paceline.launch import environment
from paceline.measure.startup import importing
from paceline.records import RunFolder

SUMMARY = "train one model and write down what it took"


def configure(parser: argparse.ArgumentParser) -> None:
    # The list of all flags would fill a screen before the first one is explained.
    parser.usage = "paceline train [flags]"
    add_config_flags(parser)
    add_control_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    values = given_flags(arguments)
    # Refused before torch is loaded, which takes two seconds.
    config = from_mapping({**_counts(), **values}) if arguments.resume is None else None
    with importing():
        from paceline.launch import launcher
        from paceline.report.summary import print_summary
        from paceline.training.checkpoint import iterations
        from paceline.training.process import keep_freed_memory

    keep_freed_memory()
    if config is None:
        outcome = launcher.resume(arguments.resume, values, arguments.quiet)
    else:
        outcome = launcher.train(config, arguments.quiet)
    if outcome.result is not None:
        folder = _as_given(outcome.folder, arguments.resume)
        print_summary(folder, outcome.result)
        is_stopped = outcome.exit_code == StoppedError.exit_code
        if outcome.exit_code:
            mark = "" if is_stopped else "error: "
            sys.stderr.write(f"paceline: {mark}{outcome.result['cause']}\n")
        if is_stopped and iterations(folder.checkpoints):
            path = shlex.quote(str(folder.path))
            sys.stderr.write(f"paceline: go on with `paceline train --resume {path}`\n")
    return outcome.exit_code


def _as_given(folder: RunFolder, path: str | None) -> RunFolder:
    """The folder under the path that the user gave with --resume, which it was resolved from."""
    given = Path(path) if path else folder.path
    return RunFolder(given) if given.resolve() == folder.path.resolve() else folder


def _counts() -> dict[str, int]:
    """Where torchrun or srun started the workers: how many they are, which flags need not say."""
    place = environment.detect()
    if place is None:
        return {}
    return {"nnodes": place.nnodes, "nproc_per_node": place.local_world_size}
