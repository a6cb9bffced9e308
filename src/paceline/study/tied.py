"""`python -m paceline.study.tied RUNNER ARGUMENTS...`: Python, asked to stop if its runner ends."""

from __future__ import annotations

import os
import signal
import sys

from paceline.launch.lifeline import die_with_parent

if __name__ == "__main__":
    # Not killed: the run is to end its workers and its machines, and to write what it has.
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
