"""`python -m paceline.study.tied RUNNER ARGUMENTS...`: Python, asked to stop if its runner ends."""

from __future__ import annotations

import os
import signal
import sys

from paceline.launch.lifeline import tie_to

if __name__ == "__main__":
    # Not killed: the run is to end its workers and its machines, and to write what it has.
    tie_to(int(sys.argv[1]), signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
