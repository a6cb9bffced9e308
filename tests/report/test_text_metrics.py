"""Metrics of text and a target loss in the summary, in reports and in comparisons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.analysis.comparison import read_comparison
from paceline.analysis.run import open_run
from paceline.errors import RecordsError
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.comparison import result_rows
from paceline.report.summary import print_summary
from tests.support.records import FakeRun, write_run

METRICS = {"accuracy": 0.9, "perplexity": 4.25, "bits_per_byte": 2.0875}


def page_of(path: Path) -> str:
    return write_report(path).page.with_suffix(".md").read_text()


def test_summary_has_the_metrics_after_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(write_run(tmp_path, FakeRun("run", more={"metrics": METRICS})))
    result = folder.read_result()
    assert result is not None
    print_summary(folder, result)
    summary = " ".join(capsys.readouterr().out.split())
    assert "loss 0.5000, perplexity 4.2500, bits per byte 2.0875; training loss" in summary


def test_report_has_a_column_for_each_metric_that_a_run_has(tmp_path: Path) -> None:
    with_metrics = write_run(tmp_path, FakeRun("run", more={"metrics": METRICS}))
    page = page_of(with_metrics)
    assert "| perplexity | 4.2500 |\n| bits per byte | 2.0875 |" in page
    images = write_run(tmp_path, FakeRun("images", more={"metrics": {"accuracy": 0.9}}))
    assert "perplexity" not in page_of(images)
    older = write_run(tmp_path, FakeRun("older"))
    assert "perplexity" not in page_of(older)


def test_table_of_evaluations_has_the_metrics(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    events = path / "events-0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for event in lines:
        if event["event"] == "evaluation":
            event["metrics"] = {**METRICS, "perplexity": 3.5, "damaged": "text"}
    events.write_text("".join(json.dumps(event) + "\n" for event in lines))
    page = page_of(path)
    assert "| validation accuracy | perplexity | bits per byte | learning rate |" in page
    assert "| 3.5000 | 2.0875 |" in page


def test_comparison_has_the_metrics(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path, FakeRun(name, more={"metrics": METRICS}))
    comparison = read_comparison([str(tmp_path / name) for name in ("one", "two")])
    rows = {row.name: row.cells for row in result_rows(comparison.groups)}
    assert rows["bits per byte"] == ["2.0875", "2.0875"]


@pytest.mark.parametrize("metrics", [[], {"perplexity": "high"}])
def test_damaged_metrics_are_rejected(metrics: object, tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run", more={"metrics": metrics}))
    with pytest.raises(RecordsError, match="metrics"):
        open_run(path)


def test_target_loss_is_shown_in_summary_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun("run", {"target_loss": 0.75}, seconds_to_target=1.5)
    folder = RunFolder(write_run(tmp_path, run))
    result = folder.read_result()
    assert result is not None
    print_summary(folder, result)
    assert "target loss 0.75 after 1.50 s, excluding evaluation" in " ".join(
        capsys.readouterr().out.split()
    )
    assert open_run(folder.path).iterations_to_target == 50
    page = page_of(folder.path)
    assert "Training time to the target loss" in page
    assert "| final loss | 0.5000 |\n| best loss | 0.5000 |" in page
