"""`paceline train`: one run."""

from __future__ import annotations

import argparse
import shlex
import sys

from paceline.cli.config_flags import add_config_flags, add_control_flags, given_flags
from paceline.config import from_mapping
from paceline.errors import StoppedError
from paceline.launch import environment
from paceline.measure.startup import importing

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
        print_summary(outcome.folder, outcome.result)
        if outcome.exit_code:
            sys.stderr.write(f"paceline: error: {outcome.result['cause']}\n")
        if outcome.exit_code == StoppedError.exit_code and iterations(outcome.folder.checkpoints):
            path = shlex.quote(str(outcome.folder.path))
            sys.stderr.write(f"paceline: go on with `paceline train --resume {path}`\n")
    return outcome.exit_code


def _counts() -> dict[str, int]:
    """Where torchrun or srun started the workers: how many they are, which flags need not say."""
    place = environment.detect()
    if place is None:
        return {}
    return {"nnodes": place.nnodes, "nproc_per_node": place.local_world_size}
