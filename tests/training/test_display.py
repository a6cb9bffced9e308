"""Terminal output during a run."""

from __future__ import annotations

import io
import re

import pytest

from paceline.training.display import COLUMNS_VARIABLE, LiveDisplay, PlainDisplay, Status


@pytest.mark.parametrize("loss", [0.5, 9999.9, 12345.6, 5e11, float("nan")])
def test_columns_stay_separate_for_any_loss(loss: float) -> None:
    out = io.StringIO()
    entry = {"epoch": 1.0, "rank": 3, "test_loss": loss, "test_accuracy": 0.1,
             "learning_rate": 0.01, "wall_seconds": 2.0, "samples_per_second": 100.0}  # fmt: skip
    PlainDisplay(out).evaluation(entry)
    row = out.getvalue().splitlines()[1].split()
    assert len(row) == 7
    assert float(row[2]) == pytest.approx(loss, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("iterations", [120, 100_000])
def test_progress_line_fits_into_80_columns(
    iterations: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COLUMNS_VARIABLE, "80")
    display = LiveDisplay(80)
    display.update(Status(iterations, iterations, 0.1234, 0.0012, 12_345.0, 0.9876, 3723.0))
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    line = next(line for line in re.split(r"[\r\n]+", shown) if "loss" in line).rstrip()
    assert line.endswith("12,345 samples/s 1:02:03 left")
    assert len(line) <= 80
