"""`paceline report`: write a report."""

from __future__ import annotations

import argparse

SUMMARY = "write a report of a run, a folder of runs or a study"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a run, a folder of runs, or a study's folder")
    parser.add_argument(
        "--out", metavar="DIR", help="folder for report.html and report.md (default: PATH)"
    )


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.report.build import write_report
    from paceline.report.terminal import print_step_costs, skipped_lines
    from paceline.terminal import open_console, paragraph

    out = None if arguments.out is None else Path(arguments.out)
    report = write_report(arguments.path, out)
    console = open_console()
    for headline in report.headlines:
        console.print(paragraph(headline, console))
    print_step_costs(console, report.collection.chapters)
    for line in skipped_lines(report.collection.skipped):
        console.print(line)
    # Paths are not wrapped, so that they can be copied.
    console.print(f"report      {report.page}", soft_wrap=True)
    console.print(f"report      {report.page.with_suffix('.md')}", soft_wrap=True)
    return 0
