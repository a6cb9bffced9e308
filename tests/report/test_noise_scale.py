"""The gradient noise scale in the summary and in a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.noise_scale import noise_curve
from paceline.analysis.run import open_run
from paceline.measure.noise_scale import NoiseSample, estimate
from paceline.records import RunFolder, noise_scale_text
from paceline.report.build import write_report
from paceline.report.summary import print_summary
from tests.support.records import FakeRun, add_noise_samples, write_run

SAMPLES = [
    NoiseSample(step, 32.0, 64.0, 2.0 + 0.01 * (step % 7), 1.2 + 0.01 * (step % 5))
    for step in range(9, 1000, 10)
]


def write_noise(folder: Path, noise: dict[str, Any], samples: list[NoiseSample]) -> Path:
    path = write_run(folder, FakeRun("run"))
    file = path / "result.json"
    result = json.loads(file.read_text())
    result["workers"][0]["noise_scale"] = noise
    result["config"]["noise_every"] = noise["every"] or "auto"
    file.write_text(json.dumps(result))
    add_noise_samples(path, samples)
    return path


def summary_of(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    result = RunFolder(path).read_result()
    assert result is not None
    print_summary(RunFolder(path), result)
    return " ".join(capsys.readouterr().out.split())


def test_summary_and_report_show_the_measured_noise_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimate(SAMPLES)
    assert found is not None
    path = write_noise(tmp_path, {"every": 10, "reason": None, **found.to_dict()}, SAMPLES)
    low, high = f"{found.low:,.0f}", f"{found.high:,.0f}"
    assert (
        f"noise scale {found.value:,.0f} samples (95% interval {low} to {high}), measured at batch"
        " size 64" in summary_of(path, capsys)
    )
    report = write_report(path)
    assert "Gradient noise scale against iteration" in report.page.read_text()
    page = report.page.with_suffix(".md").read_text()
    assert f"| noise scale at the end | {found.value:,.0f} |" in page
    assert f"| 95% interval | {low}–{high} |" in page
    assert "| measured steps | 100 |" in page
    curve = noise_curve(open_run(path))
    assert curve is not None
    assert curve.iterations[-1] == 1000
    assert curve.values[-1] == pytest.approx(found.value)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (412.0, 300.0, None, "412 samples (95% interval at least 300)"),
        (None, 93.0, None, "at least 93 samples (95% confidence)"),
        (None, None, None, "unknown"),
    ],
)
def test_a_noise_scale_without_an_upper_limit_says_what_is_known(
    value: float | None, low: float | None, high: float | None, text: str
) -> None:
    noise = {"value": value, "low": low, "high": high, "batch": 64}
    assert noise_scale_text(noise) == f"{text}, measured at batch size 64"


def test_reason_is_shown_only_if_the_noise_scale_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for every, is_shown in ((5, True), (0, False)):
        noise = {"every": every, "reason": "--something"}
        path = write_noise(tmp_path / str(every), noise, [])
        text = "noise scale not measured: --something"
        assert (text in summary_of(path, capsys)) == is_shown
        page = write_report(path).page.with_suffix(".md").read_text()
        assert "noise scale" not in page.lower().replace("noise_", "")
        assert noise_curve(open_run(path)) is None


def test_damaged_noise_scale_is_rejected(tmp_path: Path) -> None:
    path = write_noise(tmp_path, {"every": 10, "reason": None, "batch": "many"}, [])
    with pytest.raises(Exception, match="noise_scale is damaged"):
        open_run(path)
