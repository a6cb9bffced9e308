"""Run the tests in two pytest sessions at once: `python -m tests [PYTEST OPTION ...]`.

Tests that start programs mostly wait for them; the second session uses the processor meanwhile.
Options apply to both sessions. The output of the second follows that of the first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SECOND_SESSION = (
    "analysis",
    "commbench",
    "compression",
    "config",
    "data",
    "docs",
    "measure",
    "models",
    "plan",
    "report",
    "strategies",
    "study",
    "torch_backend",
    "training",
    "ui",
)
"""Folders of tests that start few programs and leave nothing in shared memory, so that the leak
check of the first session stays exact."""


def main(options: Sequence[str]) -> int:
    second = [str(TESTS / name) for name in SECOND_SESSION]
    first = [str(TESTS), *(f"--ignore={folder}" for folder in second)]
    command = [sys.executable, "-m", "pytest", *options]
    color = "yes" if sys.stdout.isatty() else "auto"
    with tempfile.TemporaryFile() as output:
        sessions = [
            subprocess.Popen([*command, *first]),
            subprocess.Popen(
                [*command, f"--color={color}", *second], stdout=output, stderr=subprocess.STDOUT
            ),
        ]
        codes = [_wait(session) for session in sessions]
        output.seek(0)
        sys.stdout.buffer.write(output.read())
        sys.stdout.buffer.flush()
    # A selection may leave one session without tests.
    accepted = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    failures = [code for code in codes if code not in accepted]
    return failures[0] if failures else min(codes)


def _wait(session: subprocess.Popen[bytes]) -> int:
    """Return the exit code. Ctrl-C reaches both sessions, which then report and exit."""
    while True:
        try:
            return session.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
