"""Precision and memory format in the summary, in a report and in a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.comparison import read_comparison
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.comparison import setting_rows
from paceline.report.summary import print_summary
from tests.support.records import FakeRun, write_run

PLAIN = {"precision": "fp32", "channels_last": False, "reason": "CPU"}
MEASURED = {
    "precision": "bf16",
    "channels_last": True,
    "reason": "measured",
    "step_seconds": {"fp32": 0.0034, "bf16 channels-last": 0.0019},
}
TEXT = "bf16 channels-last (measured: fp32 3.40 ms, bf16 channels-last 1.90 ms per step)"


def write_numerics(folder: Path, name: str, numerics: dict[str, Any] | None) -> Path:
    path = write_run(folder, FakeRun(name))
    file = path / "result.json"
    result = json.loads(file.read_text())
    if numerics is not None:
        result["workers"][0]["numerics"] = numerics
    file.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(("numerics", "is_shown"), [(MEASURED, True), (PLAIN, False)])
def test_summary_and_report_show_numerics_that_were_chosen(
    numerics: dict[str, Any], is_shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_numerics(tmp_path, "run", numerics)
    result = RunFolder(path).read_result()
    assert result is not None
    print_summary(RunFolder(path), result)
    summary = " ".join(capsys.readouterr().out.split())
    assert (f"precision {TEXT}" in summary) == is_shown
    page = write_report(path).page.with_suffix(".md").read_text()
    assert (f"| {TEXT} |" in page) == is_shown


@pytest.mark.parametrize(
    ("cuda_graph", "text"),
    [
        ({"captured": True, "reason": None, "graphs": 5, "capture_seconds": 0.07},
         "5 graphs, captured in 70.00 ms"),
        ({"captured": False, "reason": "--cuda-graph off", "graphs": 0, "capture_seconds": 0.0},
         "none: --cuda-graph off"),
    ],
)  # fmt: skip
def test_summary_and_report_show_how_steps_ran_on_a_gpu(
    cuda_graph: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_numerics(tmp_path, "run", MEASURED)
    result = json.loads((path / "result.json").read_text())
    result["workers"][0]["cuda_graph"] = cuda_graph
    (path / "result.json").write_text(json.dumps(result))
    print_summary(RunFolder(path), result)
    assert f"CUDA graph {text}" in " ".join(capsys.readouterr().out.split())
    page = write_report(path).page.with_suffix(".md").read_text()
    assert f"| {text} |" in page


def test_a_comparison_shows_formats_that_differ(tmp_path: Path) -> None:
    runs = {"cpu": PLAIN, "gpu": MEASURED, "older": None}
    paths = [str(write_numerics(tmp_path, name, numerics)) for name, numerics in runs.items()]
    (row,) = [row for row in setting_rows(read_comparison(paths).groups) if "computed" in row.name]
    assert row.cells == ["fp32", "bf16 channels-last", "-"]
    same = read_comparison([paths[0], paths[2]]).groups
    assert "computed in" not in {row.name for row in setting_rows(same)}
