"""What a launcher starts: `python -m paceline.launch.child PARENT worker|server ...`.

The rest is for launch/member.py or launch/servers.py.

Loading torch takes seconds, in which the launcher may end; so the tie to it is made before that.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn

from paceline.launch.lifeline import tie_to
from paceline.worker.process import keep_freed_memory


def main(arguments: list[str]) -> NoReturn:
    # Until training begins there is nothing to finish, and no traceback to be shown.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tie_to(int(arguments[0]))
    keep_freed_memory()
    if arguments[1] == "server":
        from paceline.launch import servers as program
    else:
        from paceline.launch import member as program  # type: ignore[no-redef]

    code = program.main(arguments[2:])
    # After a failure, gloo's threads may keep an interpreter that ends in good order waiting.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
