"""`paceline report`: a page of what the records say."""

from __future__ import annotations

import argparse

SUMMARY = "make a page of a run, a folder of runs or a study"
MOST_LEFT_OUT = 5
"""Records that are named in the terminal, of those that cannot be read."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run, a folder of runs, or a study's folder")
    parser.add_argument(
        "--out", metavar="DIR", help="where report.html and report.md go (default: PATH)"
    )


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.report.build import write_report
    from paceline.terminal import open_console, paragraph

    out = None if arguments.out is None else Path(arguments.out)
    page, collection = write_report(arguments.path, out)
    console = open_console()
    for headline in collection.headlines:
        console.print(paragraph(headline, console))
    for left in collection.left_out[:MOST_LEFT_OUT]:
        console.print(f"left out    {left.name}: {left.why}")
    if len(collection.left_out) > MOST_LEFT_OUT:
        more = len(collection.left_out) - MOST_LEFT_OUT
        console.print(f"left out    and {more:,} more: the end of the report names all")
    # Paths are not broken: they are there to be copied.
    console.print(f"report      {page}", soft_wrap=True)
    console.print(f"report      {page.with_suffix('.md')}", soft_wrap=True)
    return 0
