"""`python -m paceline.launch.ray.tied PARENT WORDS...`: a command that ends with its parent."""

from __future__ import annotations

import os
import signal
import sys

from paceline.launch.lifeline import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    # Ray's workers block Ctrl-C, and what they start would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The tie lasts: it belongs to the process, whatever program that runs.
    os.execvp(sys.argv[2], sys.argv[2:])
