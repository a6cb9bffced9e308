"""Lines that a run shows while it goes on."""

from __future__ import annotations

import io

import pytest

from paceline.worker.display import PlainDisplay


@pytest.mark.parametrize("loss", [0.5, 9999.9, 12345.6, 5e11, float("nan")])
def test_columns_stay_apart_however_large_the_loss_is(loss: float) -> None:
    out = io.StringIO()
    entry = {"epoch": 1.0, "rank": 3, "test_loss": loss, "test_accuracy": 0.1,
             "learning_rate": 0.01, "wall_seconds": 2.0, "samples_per_second": 100.0}  # fmt: skip
    PlainDisplay(out).evaluation(entry)
    row = out.getvalue().splitlines()[1].split()
    assert len(row) == 7
    assert float(row[2]) == pytest.approx(loss, rel=1e-3, nan_ok=True)
