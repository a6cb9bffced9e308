"""What a launcher starts: `python -m paceline.launch.child PARENT ...`, then launch/member.py.

Loading torch takes seconds, in which the launcher may end; so the tie to it is made before that.
"""

from __future__ import annotations

import signal
import sys

from paceline.launch.lifeline import tie_to


def main(arguments: list[str]) -> int:
    # Until training begins there is nothing to finish, and no traceback to be shown.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tie_to(int(arguments[0]))
    from paceline.launch import member

    return member.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
