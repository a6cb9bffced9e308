"""`paceline train`: one run."""

from __future__ import annotations

import argparse
import sys

from paceline.cli.flags import add_config_flags, given_flags
from paceline.config import from_mapping

SUMMARY = "train one model and write down what it took"


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_flags(parser)
    control = parser.add_argument_group("Control")
    control.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with the run in this folder from its newest checkpoint",
    )
    control.add_argument("--quiet", action="store_true", help="show no progress, only the account")


def run(arguments: argparse.Namespace) -> int:
    values = given_flags(arguments)
    # Refused before torch is loaded, which takes two seconds.
    config = None if arguments.resume else from_mapping(values)
    from paceline.launch import local
    from paceline.report.summary import print_summary
    from paceline.worker.display import open_display

    display = open_display(arguments.quiet)
    try:
        if config is None:
            folder, result, code = local.resume(arguments.resume, values, display)
        else:
            folder, result, code = local.train(config, display)
    finally:
        display.close()
    print_summary(folder, result)
    if code:
        sys.stderr.write(f"paceline: error: {result['cause']}\n")
    return code
