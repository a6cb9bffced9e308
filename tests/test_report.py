"""Tables and pictures of runs against the records they are made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.records import EventWriter, RunFolder, read_lines
from paceline.report.figure import POINTS, draw_run, training_curve

SMALL = ["--train-samples", "64", "--test-samples", "32", "--batch-size", "16", "--threads", "1",
         "--iterations", "6", "--sample-seconds", "0.1", "--quiet"]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunFolder:
    assert main(["train", *SMALL, "--out", str(tmp_path), "--name", "[bold]run"]) == 0
    assert str(tmp_path / "[bold]run") in "".join(capsys.readouterr().out.split())
    return RunFolder.open(tmp_path / "[bold]run")


def test_a_run_is_drawn_as_svg_and_png(run: RunFolder) -> None:
    svg, png = draw_run(run)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert text.rstrip().endswith("</svg>")
    assert text.count('<g id="axes_') == 4


def test_the_drawn_losses_are_the_recorded_ones(run: RunFolder) -> None:
    recorded = [
        loss
        for event in read_lines(run.events_file(0))
        if event["event"] == "iterations"
        for loss in event["loss"]
    ]
    _, seconds, losses = training_curve(run)
    assert losses == recorded
    assert seconds == sorted(seconds)


def test_a_long_curve_is_averaged_and_keeps_its_mean(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events-0.jsonl")
    losses = [float(number % 7) for number in range(10 * POINTS)]
    events.write("iterations", first=0, seconds=[0.001] * len(losses), loss=losses)
    events.close()
    _, _, drawn = training_curve(RunFolder(tmp_path))
    assert len(drawn) == POINTS
    assert sum(drawn) / len(drawn) == pytest.approx(sum(losses) / len(losses))


def test_names_are_shown_as_they_are(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(run.path)]) == 0
    assert "[bold]run" in capsys.readouterr().out


def test_a_run_that_no_worker_reported_can_be_compared(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run.read_result()
    assert result is not None
    run.write_result({**result, "workers": [], "status": "failed"})
    assert main(["compare", str(run.path)]) == 0
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["config", "final", "workers"])
def test_a_result_without_a_key_is_named_and_refused(
    key: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(run.result_file.read_text())
    del values[key]
    run.result_file.write_text(json.dumps(values))
    assert main(["compare", str(run.path)]) == 2
    assert f"it has no {key}" in capsys.readouterr().err
