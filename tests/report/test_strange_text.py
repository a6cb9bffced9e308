"""Names and texts that no encoding has letters for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.records import FakeRun, write_run


def test_a_name_that_is_no_text_costs_no_report(tmp_path: Path) -> None:
    """Names of files are bytes, and JSON can hold half of a letter."""
    odd = {"hardware": {"cpu": "\ud800"}, "warnings": ["\udcff"]}
    path = write_run(tmp_path, FakeRun("a", more=odd))
    path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff-run"))
    write_run(tmp_path, FakeRun("b", {"lr": 0.5}))
    message = subprocess.run(
        [sys.executable, "-m", "paceline", "report", str(tmp_path)],
        capture_output=True,
        check=True,
        # A terminal with next to no letters at all.
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert message.stderr == b""
    assert "?-run" in (tmp_path / "report.html").read_text("utf-8")
    assert "?-run" in (tmp_path / "report.md").read_text("utf-8")
