"""`paceline profile`: measure a training script."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.errors import RecordsError, UsageError
from paceline.records import Result, RunFolder

SUMMARY = "measure an unchanged training script"

HANG_SECONDS = 60.0
"""Shorter than the timeouts of process groups, longer than most evaluations and checkpoints."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "paceline profile [--out DIR] [--name NAME] [--steps A:B] [--trace]"
        " [--hang-seconds SECONDS] [--quiet] -- COMMAND"
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder of all runs")
    parser.add_argument("--name", metavar="NAME", help="name of the run's folder")
    parser.add_argument(
        "--steps", default="", metavar="A:B", help="measure steps A to B-1, such as 20:120"
    )
    parser.add_argument(
        "--trace", action="store_true", help="write a timeline of up to 1000 steps for Perfetto"
    )
    parser.add_argument("--quiet", action="store_true", help="print no summary and write no report")
    parser.add_argument(
        "--hang-seconds",
        type=_seconds,
        default=HANG_SECONDS,
        metavar="SECONDS",
        help="say what the ranks do if none makes progress for this long; 0 for never"
        f" (default: {HANG_SECONDS:g})",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="a command that trains with PyTorch, such as `torchrun train.py`",
    )


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        raise UsageError(
            "paceline profile needs a COMMAND: such as"
            " `paceline profile -- torchrun --nproc-per-node 2 train.py`"
        )
    from paceline.profiler.collection import is_empty
    from paceline.profiler.command import profile

    outcome = profile(
        command,
        Path(arguments.out),
        arguments.name,
        arguments.steps,
        has_trace=arguments.trace,
        hang_seconds=arguments.hang_seconds,
        on_report=_print_post_mortem,
    )
    # An empty profile leaves only its warnings.
    if not arguments.quiet or is_empty(outcome.result):
        try:
            present(outcome.folder, outcome.result, sys.stderr)
        except RecordsError as error:
            # The exit code is that of the command.
            sys.stderr.write(f"paceline: warning: {error}\n")
    return outcome.exit_code


def present(folder: RunFolder, result: Result, file: TextIO) -> None:
    """Print the summary of a profile and write its report; one line if nothing was measured."""
    from paceline.profiler.collection import is_empty

    if is_empty(result):
        file.write("".join(f"paceline: {text}\n" for text in result["warnings"]))
        return
    from paceline.report.build import write_report
    from paceline.report.summary import print_summary

    page = None
    try:
        # As `records`, relative if --out is.
        page = folder.path / write_report(folder.path).page.name
    finally:
        print_summary(folder, result, file, page)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds, got {text}")
    return value


def _print_post_mortem(report: Mapping[str, Any]) -> None:
    """Also with --quiet, which omits only the summary and the report."""
    from paceline.report.wording.post_mortem import headline, lines

    for line in (headline(report), *(f"  {line}" for line in lines(report))):
        sys.stderr.write(f"paceline: {line}\n")
    sys.stderr.flush()
