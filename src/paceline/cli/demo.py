"""`paceline demo`: a first run, what it measured, and a picture of it."""

from __future__ import annotations

import argparse

SUMMARY = "a one-minute run on generated digits, with a table and a picture"

SETTINGS = {
    "model": "lenet",
    "data": "digits",
    "epochs": 8,
    "lr": 0.02,
    "schedule": "cosine",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder that holds the runs")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from paceline.config import from_mapping
    from paceline.errors import RunError
    from paceline.launch import start
    from paceline.report.figure import draw_run
    from paceline.report.summary import print_summary

    flags = " ".join(f"--{name} {value}" for name, value in SETTINGS.items())
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"paceline train {flags}")
    outcome = start.train(from_mapping({**SETTINGS, "out": arguments.out}))
    if outcome.result is None:
        return outcome.exit_code
    print_summary(outcome.folder, outcome.result)
    if outcome.exit_code:
        raise RunError(outcome.result["cause"])
    for path in draw_run(outcome.folder):
        console.print(f"picture     {path}")
    return outcome.exit_code
