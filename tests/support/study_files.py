"""Study files, their plans, and fake run folders."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from paceline.config import RunConfig
from paceline.records import RESULT_KEYS, SCHEMA, RunFolder, write_json
from paceline.study.cells import Plan, load
from paceline.study.folder import StudyFolder

TINY_BASE = """
    base:
      model: softmax
      train_samples: 32
      test_samples: 16
      batch_size: 16
      iterations: 2
      threads: 1
      device: cpu
      tensorboard: false
      sample_seconds: 0
"""


def write_study(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


def planned(folder: Path, text: str, **options: Any) -> Plan:
    return load(write_study(folder, text), **options)


def pretend_run(
    study: StudyFolder, name: str, config: RunConfig, status: str | None = "finished"
) -> RunFolder:
    """Write the records of a run with this status; None: the run did not end."""
    folder = RunFolder(study.cells / name)
    folder.path.mkdir(parents=True)
    write_json(folder.config_file, {"schema": SCHEMA, "config": config.to_dict()})
    if status is not None:
        result: dict[str, Any] = dict.fromkeys(RESULT_KEYS)
        result |= {"schema": SCHEMA, "status": status, "final": {"test_accuracy": 0.5}}
        result |= {"workers": [{"iteration_seconds": {"mean": 0.25}}], "config": config.to_dict()}
        folder.result_file.write_text(json.dumps(result))
    return folder
