"""Faults that are planted in a script with two ranks, and what `paceline profile` names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.analysis.run import open_run
from paceline.analysis.script import findings as found
from paceline.analysis.script.findings import find_in_script
from paceline.analysis.script.slow_rank import SlowRank
from paceline.cli import main

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "fault_scripts"

# Longer than a step takes on busy cores.
DELAY_MS = 60


@pytest.mark.parametrize("fault", ["slow_input", "no_workers"])
def test_slow_input_is_named_with_its_rank_and_line(tmp_path: Path, fault: str) -> None:
    script = [str(SCRIPTS / "launch.py"), str(SCRIPTS / "train.py"), fault]
    settings = ["--rank=1", f"--severity={DELAY_MS}", "--width=128", "--batch=8", "--seconds=2"]
    command = [sys.executable, *script, *settings]
    assert (
        main(["profile", "--out", str(tmp_path), "--name", "run", "--quiet", "--", *command]) == 0
    )
    findings = find_in_script(open_run(tmp_path / "run"))
    if fault == "slow_input":
        (slow,) = (one for one in findings if isinstance(one, SlowRank))
        assert (slow.rank, slow.phase) == (1, "input")
        assert slow.seconds >= DELAY_MS / 1000
        line = slow.line
    else:
        (missing,) = (one for one in findings if isinstance(one, found.NoLoaderWorkers))
        assert missing.seconds >= 0.9 * DELAY_MS / 1000
        line = missing.line
    assert line is not None
    assert line.code.startswith("loader = DataLoader(")
