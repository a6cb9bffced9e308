"""Terminal output during a run."""

from __future__ import annotations

import io
import re

import pytest

from paceline.training.display import COLUMNS_VARIABLE, LiveDisplay, PlainDisplay, Status


@pytest.mark.parametrize("loss", [0.5, 9999.9, 12345.6, 5e11, float("nan")])
def test_columns_stay_separate_for_any_loss(loss: float) -> None:
    out = io.StringIO()
    entry = {"epoch": 1.0, "rank": 3, "test_loss": loss, "metrics": {"accuracy": 0.1},
             "learning_rate": 0.01, "wall_seconds": 2.0, "samples_per_second": 100.0}  # fmt: skip
    PlainDisplay(out).evaluation(entry)
    row = out.getvalue().splitlines()[1].split()
    assert len(row) == 7
    assert float(row[2]) == pytest.approx(loss, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize(
    ("metrics", "titles", "texts"),
    [
        ({"accuracy": 0.5, "perplexity": 2.0, "bits_per_byte": 1.0}, ["test", "acc"], ["0.5000"]),
        ({}, [], []),
        ({"mean_absolute_error": 12345.6, "f1": None}, ["mean_absolute_error", "f1"],
         ["1.235e+04", "-"]),
    ],
)  # fmt: skip
def test_rows_have_the_metrics_that_do_not_follow_from_the_loss(
    metrics: dict[str, float | None], titles: list[str], texts: list[str]
) -> None:
    out = io.StringIO()
    entry = {"epoch": 1.0, "rank": 3, "test_loss": 0.1, "metrics": metrics,
             "learning_rate": 0.01, "wall_seconds": 2.0, "samples_per_second": 100.0}  # fmt: skip
    PlainDisplay(out).evaluation(entry)
    header, row = out.getvalue().splitlines()
    assert header.split() == ["epoch", "rank", "test", "loss", *titles, "lr", "wall", "s",
                              "samples/s"]  # fmt: skip
    assert row.split() == ["1.00", "3", "0.1000", *texts, "0.01", "2.0", "100"]
    assert len(header) == len(row)


def test_plain_progress_says_whose_throughput_it_has() -> None:
    out = io.StringIO()
    PlainDisplay(out, 0.0).update(Status(3, 10, 0.5, 0.01, 27.0, {}, 5.0))
    assert "27 samples/s per worker" in out.getvalue()


@pytest.mark.parametrize("iterations", [120, 100_000])
def test_progress_line_fits_into_80_columns(
    iterations: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COLUMNS_VARIABLE, "80")
    display = LiveDisplay(80)
    metrics = {"accuracy": 0.9876, "perplexity": 3.0, "f1": 0.5}
    display.update(Status(iterations, iterations, 0.1234, 0.0012, 12_345.0, metrics, 3723.0))
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    line = next(line for line in re.split(r"[\r\n]+", shown) if "loss" in line).rstrip()
    assert "loss 0.1234 acc 0.9876 lr" in line
    assert line.endswith("12,345 samples/s 1:02:03 left")
    assert len(line) <= 80
