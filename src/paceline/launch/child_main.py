"""What a launcher starts: `python -m paceline.launch.child_main PARENT worker|server|MODULE ...`.

The rest is for the `main` of launch/worker.py, launch/parameter_servers.py or the module.

Loading torch takes seconds, in which the launcher may end; so the tie to it is made before that.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from typing import NoReturn

from paceline.child_process import die_with_parent
from paceline.measure.startup import importing
from paceline.training.process import keep_freed_memory

PROGRAMS = {"worker": "paceline.launch.worker", "server": "paceline.launch.parameter_servers"}


def main(arguments: list[str]) -> NoReturn:
    # Until training begins there is nothing to finish, and no traceback to be shown.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(int(arguments[0]))
    keep_freed_memory()
    with importing():
        program = importlib.import_module(PROGRAMS.get(arguments[1], arguments[1]))
    code: int = program.main(arguments[2:])
    # After a failure, gloo's threads may keep an interpreter that ends in good order waiting.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
