"""`paceline compare`: results of several runs side by side."""

from __future__ import annotations

import argparse

SUMMARY = "put the results of several runs side by side"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run")


def run(arguments: argparse.Namespace) -> int:
    from paceline.errors import RecordsError
    from paceline.records import RunFolder
    from paceline.report.comparison import print_comparison

    results = []
    for path in arguments.runs:
        result = RunFolder.open(path).read_result()
        if result is None:
            raise RecordsError(f"{path} has no result yet: it is still running, or was killed")
        results.append(result)
    print_comparison(results)
    return 0
