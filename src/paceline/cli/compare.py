"""`paceline compare`: results of several runs or studies side by side."""

from __future__ import annotations

import argparse

SUMMARY = "put the results of several runs or studies side by side"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a run, a folder of runs, or a study's folder"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page too")
    parser.add_argument("--markdown", metavar="FILE", help="write the page as Markdown too")


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.report.comparison import read_compared
    from paceline.report.comparison_output import (
        print_comparison,
        write_comparison,
        write_markdown,
    )

    compared = read_compared(arguments.paths)
    print_comparison(compared)
    if arguments.html is not None:
        write_comparison(compared, Path(arguments.html))
    if arguments.markdown is not None:
        write_markdown(compared, Path(arguments.markdown))
    return 0
