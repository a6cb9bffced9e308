"""`paceline demo`: compare six strategies in a short study, with a report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from paceline.cli.study import run_study

SUMMARY = "compare six strategies on two workers in two minutes, with a report"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="studies", metavar="DIR", help="folder of studies")


def run(arguments: argparse.Namespace) -> int:
    # A new folder every time: a finished study would not run again.
    name = time.strftime("first-look-%Y%m%d-%H%M%S")
    return run_study("first-look", scale="quick", out=str(Path(arguments.out) / name))
