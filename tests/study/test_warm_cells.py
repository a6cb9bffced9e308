"""Cells that are forked from a warm process, on clusters that stay up, equal cold ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from paceline.emulation.state import all_paths
from paceline.study.folder import StudyFolder
from paceline.study.progress import LineDisplay
from paceline.study.runner import Runner, train_argv
from tests.support.study_files import planned
from tests.support.warm import PrewarmedStarter

LIMIT_SECONDS = 120.0

BASE = """
    base:
      model: troubled:Network
      data: digits
      train_samples: 64
      test_samples: 16
      batch_size: 16
      iterations: 4
      eval_every: 2
      nproc_per_node: 2
      threads: 1
      device: cpu
      strategy: allreduce
      sample_seconds: 0.2
"""

COLD = """
import sys
from paceline.cli import main
from paceline.launch.fork_server import ForkServer
ForkServer.fork = lambda: None
sys.exit(main(sys.argv[1:]))
"""
"""`paceline` with workers that are new interpreters; nodes of a cluster still fork theirs."""

TROUBLED = """
import os, signal, time
import torch

class Network(torch.nn.Module):
    trouble = ""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.Tanh(),
            torch.nn.Linear(32, 10),
        )
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls == 3 and self.trouble == "fails":
            raise RuntimeError("as told")
        if self.calls == 3 and self.trouble == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and self.trouble == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        return self.layers(inputs)

class Failing(Network):
    trouble = "fails"

class Killed(Network):
    trouble = "is killed"

class Hanging(Network):
    trouble = "hangs"
"""


@pytest.fixture(autouse=True)
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "troubled.py").write_text(TROUBLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.study.runner.STOP_SECONDS", 5.0)


def results(text: str, starter: PrewarmedStarter, tmp_path: Path) -> tuple[list[Any], list[Any]]:
    """The results of the finished cells of a study, warm, and of their commands, cold."""
    plan = planned(tmp_path, text)
    folder = StudyFolder(tmp_path / "study")
    display = LineDisplay(Console(quiet=True))
    with folder.locked():
        outcome = Runner(plan, folder, display, starter.fork_server).run()
    broken = {cell.run for cell in outcome.failed}
    warm: list[Any] = []
    cold: list[Any] = []
    for cell in plan.study.cells:
        if cell.run in broken:
            continue
        warm.append(json.loads((folder.cells / cell.run / "result.json").read_text()))
        words = train_argv(plan.configs[cell.id])
        assert words[:2] == ["-m", "paceline"]
        name = f"cold-{len(cold)}"
        flags = ["--out", str(tmp_path), "--name", name]
        command = [sys.executable, "-c", COLD, *words[2:], *flags]
        subprocess.run(command, check=True, timeout=LIMIT_SECONDS)
        cold.append(json.loads((tmp_path / name / "result.json").read_text()))
    return warm, cold


def assert_same(warm: list[Any], cold: list[Any]) -> None:
    for one, other in zip(warm, cold, strict=True):
        assert (one["status"], other["status"]) == ("finished", "finished")
        assert one["weights_sha256"] == other["weights_sha256"]
        assert [row["test_loss"] for row in one["history"]] == [
            row["test_loss"] for row in other["history"]
        ]
        assert one["final"] == other["final"]
        assert keys(one) == keys(other)


def keys(value: Any, path: str = "") -> set[str]:
    """The paths of all keys; warnings depend on the load of the machine."""
    if isinstance(value, dict):
        here = {f"{path}/{key}" for key in value if key != "warnings"}
        return here.union(*(keys(each, f"{path}/{key}") for key, each in value.items()))
    if isinstance(value, list) and not path.endswith("/warnings"):
        return set().union(*(keys(each, f"{path}[]") for each in value))
    return set()


@pytest.mark.timeout(300)
def test_warm_cells_equal_cold_runs_bit_for_bit(starter: PrewarmedStarter, tmp_path: Path) -> None:
    text = (
        BASE
        + """
    grid:
      strategy: [allreduce, ddp, parameter_server]
    repeats: 2
    """
    )
    warm, cold = results(text, starter, tmp_path)
    assert len(warm) == 6
    assert len({result["weights_sha256"] for result in warm}) > 1
    assert_same(warm, cold)


@pytest.mark.timeout(300)
def test_a_warm_cell_equals_a_cold_run_after_cells_that_broke(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    text = (
        BASE
        + """
    grid:
      model:
        - troubled:Failing
        - troubled:Killed
        - troubled:Hanging
        - troubled:Network
    time_limit_minutes: 0.2
    """
    )
    warm, cold = results(text, starter, tmp_path)
    assert len(warm) == 1
    assert_same(warm, cold)


@pytest.mark.root
@pytest.mark.iproute
@pytest.mark.timeout(300)
def test_cells_on_a_kept_cluster_equal_cold_runs_on_their_own(
    starter: PrewarmedStarter, tmp_path: Path
) -> None:
    text = (
        BASE.replace("nproc_per_node: 2", "cluster: nodes=2,cpus=0.4")
        + """
    grid:
      model: [troubled:Killed, troubled:Hanging, troubled:Network]
    time_limit_minutes: 0.2
    """
    )
    warm, cold = results(text, starter, tmp_path)
    assert len(warm) == 1
    assert_same(warm, cold)
    # Other programs may have clusters as well.
    assert [path for path in all_paths() if path.name.startswith(f"run-{os.getpid()}-")] == []
    processes = [each.info for each in psutil.process_iter(["name", "cwd"])]
    assert [
        each for each in processes if "node " in each["name"] and each["cwd"] == str(tmp_path)
    ] == []
