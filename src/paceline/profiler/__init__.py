"""Measures a training script that knows nothing of paceline.

PyTorch calls `attach` at the end of `import torch` (entry point in pyproject.toml). Without the
environment variable that `paceline profile` sets, it returns at once.

Modules in reading order:

- `command`: runs the command and signals it, samples its resources
- `session`: the profiler of one process, from `import torch` to its end
- `tracking.hooks`: where torch calls the profiler
- `tracking.step_tracker`: which phase the program is in, and where its steps end
- `recording_windows`: in which steps everything is recorded, if they are short
- `tracking.paused_steps`: what is known of the others
- `rank_log`: the event file of one rank
- `collectives.recorder`: every collective of every process group, and when it blocks the program
- `collectives.log`: the file with one rank's collectives
- `collectives.pauses`: stops recording collectives for some steps
- `collectives.sampling`: what the records stand for, if some steps were not recorded
- `collectives.waiting`: waiting for slower ranks, from the collectives of all ranks
- `collectives.estimated_waits`: the same, if some steps were not recorded
- `collectives.communication`: what the collectives add to result.json
- `post_mortem.process_facts`: what a process is, how it ended, and its stacks
- `post_mortem.watchdog`: notices ranks that end or make no progress
- `post_mortem.examination`: what each rank does then
- `post_mortem.end_of_rank`: what a rank did after its last record
- `trace`: the timelines of `--trace`
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
"""Environment variable with the factor of `recording_windows`, a power of two. For tests: without
it, the cost of recording decides."""
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
