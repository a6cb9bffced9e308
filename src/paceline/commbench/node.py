"""What is started on each machine of `--hosts` or `--cluster`: `python -m paceline.commbench.node`."""

from __future__ import annotations

import sys

from paceline.commbench.launch import run_here
from paceline.commbench.spec import Plan
from paceline.launch import node_main
from paceline.launch.control_channel import tell, telling_errors


def _measure(task: node_main.Task) -> None:
    record = run_here(Plan.from_dict(task.config), task.quiet)
    if record is not None:
        tell(record=record)


if __name__ == "__main__":
    sys.exit(telling_errors(lambda: node_main.main(_measure)))
