"""A worker that commbench/launch.py has started: `PLAN FOLDER quiet|shown`.

It leaves the record in the folder, or else why there is none, for its launcher.
"""

from __future__ import annotations

import time
from pathlib import Path

from paceline.commbench.launch import showing
from paceline.commbench.runner import run
from paceline.commbench.spec import BenchmarkSpec
from paceline.errors import PacelineError, error_line
from paceline.launch import environment
from paceline.launch.termination import Termination, write_failure
from paceline.records import RunFolder, read_json, write_json

RECORD = "comm.json"


def main(arguments: list[str]) -> int:
    plan = BenchmarkSpec.from_dict(read_json(Path(arguments[0]))["plan"])
    folder = RunFolder(Path(arguments[1]))
    place = environment.detect()
    assert place is not None
    try:
        with showing(quiet=arguments[2] == "quiet" or place.rank > 0) as show:
            record = run(place, plan, show)
        if record is not None:
            write_json(folder.path / RECORD, record)
        return 0
    except PacelineError as error:
        ending = Termination(
            str(error), error.exit_code, is_secondary=error.is_secondary, ended=time.time()
        )
    except Exception as error:  # noqa: BLE001 - told by the launcher
        ending = Termination(error_line(error), ended=time.time())
    write_failure(folder, place.rank, ending)
    return ending.exit_code
