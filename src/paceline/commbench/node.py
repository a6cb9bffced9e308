"""`python -m paceline.commbench.node`: the program on each machine of `--hosts` or `--cluster`."""

from __future__ import annotations

import sys

from paceline.commbench.launch import run_here
from paceline.commbench.spec import BenchmarkSpec
from paceline.launch import node_main
from paceline.launch.control_channel import report_errors, send_status


def _measure(task: node_main.NodeTask) -> None:
    record = run_here(BenchmarkSpec.from_dict(task.config), task.quiet)
    if record is not None:
        send_status(record=record)


if __name__ == "__main__":
    sys.exit(report_errors(lambda: node_main.main(_measure)))
