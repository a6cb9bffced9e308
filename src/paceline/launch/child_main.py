"""Entry point of child processes: `python -m paceline.launch.child_main PROGRAM ...`.

PROGRAM is a key of PROGRAMS. Its `main` gets the remaining arguments, a configuration
file and a run folder first, and returns an exit code. An error that it raises goes to the launcher
through the folder.
"""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path
from typing import NoReturn

from paceline.child_process import exit_quickly
from paceline.measure.startup import importing
from paceline.training.process import keep_freed_memory

PROGRAMS = {
    "worker": "paceline.launch.worker",
    "server": "paceline.launch.parameter_servers",
    "comm worker": "paceline.commbench.runner",
}


def main(arguments: list[str]) -> NoReturn:
    # Until training begins there is nothing to finish, and no traceback to show.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    keep_freed_memory()
    exit_quickly(_run(arguments[0], arguments[1:]), joins_threads=False)


def _run(name: str, arguments: list[str]) -> int:
    with importing():
        program = importlib.import_module(PROGRAMS[name])
        from paceline.launch.termination import report_failure
        from paceline.records import RunFolder
    try:
        code: int = program.main(arguments)
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - reported by the launcher
        return report_failure(error, RunFolder(Path(arguments[1])))
    return code


if __name__ == "__main__":
    main(sys.argv[1:])
