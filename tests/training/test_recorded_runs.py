"""Runs recorded by earlier versions still resume, to the same weights, and still report.

Each folder below recorded_runs/ is a run of ten iterations as a kill after its checkpoint at the
fifth left it; `uninterrupted.json` is the result of the same run when nothing stopped it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch import launcher
from paceline.report.build import write_report

RECORDED = Path(__file__).with_name("recorded_runs")
NAMES = sorted(config.parent.name for config in RECORDED.glob("*/config.json"))


@pytest.fixture
def killed_run(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of a recorded run, with its own model importable."""
    monkeypatch.chdir(RECORDED)
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / request.param, folder)
    return folder


def uninterrupted(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "uninterrupted.json").read_text())
    return result


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("killed_run", NAMES, indirect=True)
def test_recorded_run_resumes_to_the_weights_of_an_uninterrupted_run(killed_run: Path) -> None:
    expected = uninterrupted(killed_run)
    result = launcher.resume(str(killed_run), {}, quiet=True).result
    assert result is not None
    assert result["status"] == "finished"
    assert result["iterations"] == 10
    assert result["samples"] == expected["samples"]
    # Kernels of other instruction sets round differently, and so do those for other processors.
    is_same_kind = (
        torch.backends.cpu.get_cpu_capability() == expected["cpu_capability"]
        and result["hardware"]["cpu"] == expected["hardware"]["cpu"]
    )
    if is_same_kind:
        assert result["weights_sha256"] == expected["weights_sha256"]
    tolerance = 1e-4 if is_same_kind else 1e-3
    loss = expected["final"]["test_loss"]
    assert result["final"]["test_loss"] == pytest.approx(loss, rel=tolerance)


@pytest.mark.parametrize("killed_run", NAMES, indirect=True)
def test_recorded_run_reports_its_accuracy_and_phases(killed_run: Path) -> None:
    (killed_run / "uninterrupted.json").rename(killed_run / "result.json")
    expected = json.loads((killed_run / "result.json").read_text())
    report = write_report(killed_run)
    page, collection = report.page, report.collection
    assert not collection.skipped
    text = page.with_suffix(".md").read_text()
    assert f"{expected['final']['test_accuracy']:.4f}" in text
    for phase in ("forward", "backward"):
        assert phase in text
