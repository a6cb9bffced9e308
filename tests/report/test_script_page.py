"""Findings about a profiled script on its page, in the terminal and in comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.summary import print_summary
from tests.support.script_records import BALANCED, FakeScript, write_script

SLOW = FakeScript([{**BALANCED, "wait": 0.003}, {**BALANCED, "forward": 0.007}])
STRAGGLER = (
    "rank 1 on node-a takes 12.50 ms per step without communication, 1.32 times as long as the"
    " others (9.50 ms), mostly in forward, from the beginning; the others wait 23.1% of each step"
    " for it."
)


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_page_begins_with_the_costliest_fault(tmp_path: Path) -> None:
    run = write_script(tmp_path, SLOW)
    (headline,) = write_report(run.folder.path).headlines
    assert f"Straggler: {STRAGGLER}" in headline
    page = (run.folder.path / "report.md").read_text()
    assert f"- **Straggler**: {STRAGGLER}" in page
    assert "Compare the machine of rank 1 with the others" in page
    # Options of `paceline train` do not help a script.
    assert "--shares" not in page
    assert "--strategy" not in page


def test_the_terminal_names_faults_after_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_script(tmp_path, SLOW)
    assert run.result is not None
    result = {**run.result, "nodes": [], "measurement_overhead": {}}
    print_summary(RunFolder(run.folder.path), result)
    output = words(capsys.readouterr().out)
    assert f"status finished finding Straggler: {STRAGGLER} Compare the machine" in output


def test_a_comparison_names_faults_with_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_script(tmp_path / "a", FakeScript()), write_script(tmp_path / "b", SLOW)]
    folders = [str(run.folder.path) for run in paths]
    page = tmp_path / "page.html"
    assert main(["compare", *folders, "--html", str(page)]) == 0
    assert f"Straggler: {STRAGGLER}" in words(capsys.readouterr().out)
    assert "1.32 times as long" in page.read_text()
