"""`paceline demo`: six strategies side by side, what each one costs, and a page about it."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from paceline.cli.study import run_study

SUMMARY = "six strategies on two workers in two minutes, with a verdict and a page"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="studies", metavar="DIR", help="folder of studies")


def run(arguments: argparse.Namespace) -> int:
    # Each demo is one of its own: whoever asks for it again wants to see it run.
    name = time.strftime("first-look-%Y%m%d-%H%M%S")
    return run_study("first-look", scale="quick", out=str(Path(arguments.out) / name))
