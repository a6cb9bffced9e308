"""`python -m paceline.launch.ray.tied PARENT WORDS...`: a command that ends with its parent."""

from __future__ import annotations

import os
import sys

from paceline.launch.lifeline import tie_to

if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    # The tie lasts: it belongs to the process, whatever program that runs.
    os.execvp(sys.argv[2], sys.argv[2:])
