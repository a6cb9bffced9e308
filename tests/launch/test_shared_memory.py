"""Runs whose workers share memory: by `--strategy shared`, and by `--communicator hierarchical`.

That no process and no shared memory is left is checked after every test (tests/leaks.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.commands import Ended, launch
from paceline.records import Result, read_json


def result_of(out: Path, **settings: Any) -> Result:
    result = launch(out, nproc_per_node=2, **settings).result
    assert result is not None
    assert result["status"] == "finished", result["cause"]
    return result


@pytest.mark.parametrize("strategy", ["allreduce", "overlap", "sharded"])
def test_two_workers_end_with_the_same_bits_as_over_torch(
    strategy: str, tmp_path: Path, talkative_run: tuple[Path, Ended]
) -> None:
    """Whatever the strategy: two numbers have one sum."""
    result = result_of(tmp_path, strategy=strategy, communicator="hierarchical")
    assert result["config"]["communicator"] == "hierarchical"
    expected = read_json(talkative_run[0] / "result.json")
    assert expected["config"]["communicator"] == "torch"
    assert result["weights_sha256"] == expected["weights_sha256"]
