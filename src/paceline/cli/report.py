"""`paceline report`: a page of what the records say."""

from __future__ import annotations

import argparse

SUMMARY = "make a page of a run, a folder of runs or a study"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run, a folder of runs, or a study's folder")
    parser.add_argument(
        "--out", metavar="DIR", help="where report.html and report.md go (default: PATH)"
    )


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.console import Console

    from paceline.report.build import write_report

    out = None if arguments.out is None else Path(arguments.out)
    page, collection = write_report(arguments.path, out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for headline in collection.headlines:
        console.print(headline)
    for left in collection.left_out:
        console.print(f"left out    {left.name}: {left.why}")
    console.print(f"report      {page}")
    console.print(f"report      {page.with_suffix('.md')}")
    return 0
