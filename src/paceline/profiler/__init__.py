"""Measures a training script that knows nothing of paceline.

PyTorch calls `attach` at the end of `import torch` (entry point in pyproject.toml). Without the
environment variable that `paceline profile` sets, it returns at once.

Modules in reading order:

- `command`: runs the command and signals it, samples its resources
- `session`: the profiler of one process, from `import torch` to its end
- `hooks`: where torch calls the profiler
- `step_tracker`: which phase the program is in, and where its steps end
- `rank_log`: the event file of one rank
- `collectives`: every collective of every process group, and when it blocks the program
- `collective_log`: the file with one rank's collectives
- `recording_windows`: in which steps collectives are recorded
- `sampling`: what the records stand for, if some steps were not recorded
- `waiting`: waiting for slower ranks, from the collectives of all ranks
- `communication`: what the collectives add to result.json
- `process_facts`: what a process is, how it ended, and its stacks
- `watchdog`: notices ranks that end or make no progress
- `post_mortem`: what each rank does then
- `trace`: the timelines of `--trace`
- `end_of_rank`: what a rank did after its last record
- `collection`: result.json from the event files of all ranks
"""

from __future__ import annotations

import os

__all__ = [
    "FACTOR_VARIABLE",
    "FOLDER_VARIABLE",
    "POST_MORTEM_FILE",
    "STEPS_VARIABLE",
    "TRACE_VARIABLE",
    "WARNINGS_FILE",
    "attach",
]

FOLDER_VARIABLE = "PACELINE_PROFILE"
"""Environment variable with the run folder of the profile."""
STEPS_VARIABLE = "PACELINE_PROFILE_STEPS"
"""Environment variable with the steps to measure, such as 20:120; all if it is not set."""
TRACE_VARIABLE = "PACELINE_PROFILE_TRACE"
"""Environment variable that is 1 if a trace is written."""
FACTOR_VARIABLE = "PACELINE_PROFILE_FACTOR"
"""Environment variable with a power of two: one in so many windows of steps has its collectives
recorded, from the first on. For tests: without it, the cost of recording decides."""
POST_MORTEM_FILE = "post-mortem.json"
"""Reports of the watchdog, until they are part of the result."""
WARNINGS_FILE = "profiler-warnings.jsonl"
"""Warnings of processes, until they are part of the result."""


def attach() -> None:
    """Start measuring this process if `paceline profile` started it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        from paceline.profiler.session import start

        has_trace = os.environ.get(TRACE_VARIABLE) == "1"
        start(folder, os.environ.get(STEPS_VARIABLE, ""), has_trace=has_trace)
