"""Findings about a profiled script on its page, in the terminal and in comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.profiler.collection import settings_of_command
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.sections.overview import command
from paceline.report.summary import print_summary
from tests.support.markdown_tables import facts_below
from tests.support.script_records import BALANCED, FakeScript, line, write_script

SLOW = FakeScript([{**BALANCED, "wait": 0.003}, {**BALANCED, "forward": 0.007}])
STRAGGLER = (
    "rank 1 on node-a takes 12.50 ms per step, without communication and time without a core,"
    " 1.32 times as long as the others (9.50 ms), mostly in forward, from the beginning; the others"
    " wait 23.1% of each step for it."
)


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_page_begins_with_the_costliest_fault(tmp_path: Path) -> None:
    run = write_script(tmp_path, SLOW)
    (headline,) = write_report(run.folder.path).headlines
    assert f"Straggler: {STRAGGLER}" in headline
    page = (run.folder.path / "report.md").read_text()
    assert f"- **Straggler**: {STRAGGLER}" in page
    # The ranks share a machine, so it is not the cause.
    assert "Other ranks on the same machine are faster" in page
    assert "Compare the machine" not in page
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
    assert (
        f"status finished finding Straggler: {STRAGGLER} Other ranks on the same machine" in output
    )


def test_the_summary_and_the_page_have_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"node": 0, "cpu_percent_mean": 46.0, "machine_cpu_percent_mean": 96.0,
              "rss_bytes_mean": 1e6, "rss_bytes_peak": 2e6}]  # fmt: skip
    slow = {**BALANCED, "forward": 0.006}
    script = FakeScript([BALANCED, slow], more={"nodes": nodes, "command_seconds": 21.0})
    run = write_script(tmp_path, script)
    assert run.result is not None
    for rank, worker in enumerate(run.result["workers"]):
        worker["iteration_seconds"]["first"] = 0.010 + 0.002 * rank
    print_summary(RunFolder(run.folder.path), {**run.result, "measurement_overhead": {}})
    summary = words(capsys.readouterr().out)
    page = write_report(run.folder.path).page.with_suffix(".md").read_text()
    assert "CPU 0.46 of 2 cores mean" in summary
    assert "0.46 CPU cores on average" in page
    assert "the command took 21.0 s" in summary
    assert "21.0 s of the command" in page
    assert "the first 11.00 ms, averaged over 2 workers" in summary
    assert "| 11.00 ms |" in page


def test_the_page_has_the_command_that_repeats_a_profile(tmp_path: Path) -> None:
    words = ["torchrun", "train.py", "--steps", "3"]
    settings = settings_of_command(words, "own", "20:40", has_trace=True)
    again = "paceline profile --steps 20:40 --trace -- torchrun train.py --steps 3"
    assert command(settings) == again
    page = write_report(write_script(tmp_path, FakeScript()).folder.path).page.with_suffix(".md")
    assert "To rerun it:" in page.read_text()


def test_a_line_is_named_once_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = {**line(15, "loader = DataLoader(data)"), "workers": 0, "batches": 200, "seconds": 1.0}
    script = FakeScript(
        [{**BALANCED, "input": 0.005}] * 2, facts=[{"loaders": [loader]}, {"loaders": [loader]}]
    )
    run = write_script(tmp_path, script)
    assert run.result is not None
    result = {**run.result, "nodes": [], "measurement_overhead": {}}
    print_summary(RunFolder(run.folder.path), result)
    output = words(capsys.readouterr().out)
    assert "DataLoader without workers" in output
    assert output.count("train.py:15") == 1


def test_the_headline_counts_the_other_findings_of_the_list(tmp_path: Path) -> None:
    note = {**line(23, "total += loss.item()"), "call": "Tensor.item", "count": 200, "steps": 200,
            "seconds": 0.001}  # fmt: skip
    run = write_script(tmp_path, FakeScript(SLOW.phases, facts=[{"calls": [note]}, {}]))
    (headline,) = write_report(run.folder.path).headlines
    page = (run.folder.path / "report.md").read_text()
    subjects = ("Straggler", "Blocking call", "Compute-bound")
    assert [f"- **{one}**: " in page for one in subjects] == [True] * 3
    assert headline.endswith(" 2 more findings below.")


def test_code_that_belongs_to_no_phase_is_part_of_a_step(tmp_path: Path) -> None:
    """Such as batches that a script makes without a DataLoader."""
    script = FakeScript([{**BALANCED, "other": 0.03}] * 2)
    page = write_report(write_script(tmp_path, script).folder.path).page.with_suffix(".md")
    text = page.read_text()
    assert "- **Bound by other code**: iteration time: 10.0% forward" in text
    assert "75.0% other code." in text
    assert facts_below(text, "| per iteration")["other"] == "30.00 ms (75.0%)"


def test_a_busy_machine_has_one_account(tmp_path: Path) -> None:
    nodes = [{"node": 0, "cpu_percent_mean": 100.0, "machine_cpu_percent_mean": 96.0}]
    waits = {"main_queue_seconds": 0.002}
    script = FakeScript(SLOW.phases, growth=[waits, waits], more={"nodes": nodes})
    page = write_report(write_script(tmp_path, script).folder.path).page.with_suffix(".md")
    text = page.read_text()
    # The straggler is slow apart from that time.
    assert "- **Straggler**: rank 1" in text
    assert (
        "other processes used 46.0% of the CPU. Step times and phases include the time in which a"
        " rank was ready to run but had no core (up to 15." in text
    )
    assert "can explain" not in text


def test_a_comparison_names_faults_with_their_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write_script(tmp_path / "a", FakeScript()), write_script(tmp_path / "b", SLOW)]
    folders = [str(run.folder.path) for run in paths]
    page = tmp_path / "page.html"
    assert main(["compare", *folders, "--html", str(page)]) == 0
    assert f"Straggler: {STRAGGLER}" in words(capsys.readouterr().out)
    assert "1.32 times as long" in page.read_text()


def test_a_hang_that_ended_is_named_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {"operation": "all_reduce", "group": "0", "sequence": 4, "bytes": 8, "seconds": 5.0,
             "missing_ranks": [1]}  # fmt: skip
    states: list[dict[str, Any]] = [
        {"rank": rank, "ended": None, "exception": None, "collective": pending, "stack": [],
         "line": f"train.py:{40 + rank} in main"}
        for rank, pending in ((0, waits), (1, None))
    ]  # fmt: skip
    report = {"event": "hang", "seconds": 5.0, "paused_seconds": 30.0, "first_rank": None,
              "mismatches": [], "ranks": states}  # fmt: skip
    pause = "Training paused for 30.0 s and resumed: rank 1 at train.py:41 in main."
    run = write_script(tmp_path, FakeScript(more={"post_mortem": [report]}))
    (answer,) = write_report(run.folder.path).headlines
    assert answer.startswith(f"{pause} train.py: 10.00 ms per iteration (median; 10.00 ms mean).")
    page = (run.folder.path / "report.md").read_text()
    assert "## Why training paused" in page
    assert "Why training stopped" not in page
    assert run.result is not None
    print_summary(run.folder, run.result)
    facts = words(capsys.readouterr().out).partition("100.0% ")[2]
    assert facts.startswith(f"pause {pause} status finished")


def test_phases_that_exceed_the_step_time_are_explained(tmp_path: Path) -> None:
    """Such as with an all-reduce after each evaluation, which is not part of a step."""
    why = "phases add up to more than the step time"
    run = write_script(tmp_path, FakeScript())
    assert why not in write_report(run.folder.path).page.with_suffix(".md").read_text()
    result = run.folder.read_result()
    assert result is not None
    result["workers"][0]["after_first"]["phases"]["exchange"] += 0.1
    run.folder.write_result(result)
    assert why in write_report(run.folder.path).page.with_suffix(".md").read_text()
