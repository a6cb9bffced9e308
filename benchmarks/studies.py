"""Duration of the built-in studies at quick scale, and whether their accuracies say anything.

    python benchmarks/studies.py [NAME...] [--out DIR]

Runs each study in a new folder, or checks a folder of DIR that has it already. Fails if a
configuration did not finish, or if a test accuracy is not above chance (a binomial test against
guessing). Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.analysis.accuracy import find_chance_accuracy
from paceline.analysis.collection import collect
from paceline.formatting import format_duration
from paceline.study import catalogue
from paceline.study.folder import StudyFolder


def run_study(name: str, folder: Path) -> float:
    command = [sys.executable, "-m", "paceline", "study", "run", name, "--scale", "quick"]
    begin = time.monotonic()
    subprocess.run([*command, "--out", str(folder)], check=False, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def check(folder: Path) -> list[str]:
    """What is wrong with a study: configurations that did not finish, accuracies at chance."""
    chapters = collect(folder).chapters
    groups = [group for chapter in chapters for group in chapter.groups]
    found = [
        f"{group.label}: {group.status} {group.trouble}".strip()
        for group in groups
        if group.is_troubled or not group.finished
    ]
    for chapter in chapters:
        found += [
            f"{chapter.title}, {one.label}: accuracy {one.accuracy:.4f} of {one.test_samples}"
            f" samples is at chance"
            for one in find_chance_accuracy(chapter.groups)
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=catalogue.names())
    parser.add_argument("--out", type=Path, default=Path(tempfile.mkdtemp(prefix="studies-")))
    arguments = parser.parse_args()
    problems = []
    print("study             runs  configurations  duration  lowest accuracy")
    for name in arguments.names:
        folder = arguments.out / name
        seconds = None if StudyFolder.is_study(folder) else run_study(name, folder)
        collection = collect(folder)
        accuracies = [
            accuracy
            for group in collection.groups
            if (accuracy := group.mean_of("test_accuracy")) is not None
        ]
        print(
            f"{name:16}  {len(collection.runs):4}  {len(collection.groups):14}"
            f"  {'-' if seconds is None else format_duration(seconds):>8}"
            f"  {min(accuracies, default=float('nan')):15.4f}",
            flush=True,
        )
        problems += [f"{name}: {problem}" for problem in check(folder)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
