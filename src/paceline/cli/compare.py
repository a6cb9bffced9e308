"""`paceline compare`: compare runs or studies."""

from __future__ import annotations

import argparse

SUMMARY = "compare the results of runs or studies"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a run, a folder of runs, or a study's folder"
    )
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")
    parser.add_argument("--markdown", metavar="FILE", help="also write Markdown")


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.analysis.comparison import read_comparison
    from paceline.errors import UsageError
    from paceline.report.comparison import write_comparison, write_markdown
    from paceline.report.terminal import print_comparison

    compared = read_comparison(arguments.paths)
    if len(arguments.paths) == 1 and len(compared.groups) < 2:
        reason = "".join(f"; skipped {one.name}: {one.reason}" for one in compared.skipped[:1])
        raise UsageError(
            f"{arguments.paths[0]} holds one configuration: give two or more runs, folders of"
            f" runs or studies to compare{reason}"
        )
    print_comparison(compared)
    if arguments.html is not None:
        write_comparison(compared, Path(arguments.html))
    if arguments.markdown is not None:
        write_markdown(compared, Path(arguments.markdown))
    return 0
