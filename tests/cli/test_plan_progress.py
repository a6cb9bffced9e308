"""Progress of `paceline plan`."""

from __future__ import annotations

import pytest

from paceline.cli import plan


def test_progress_is_shown_every_few_seconds_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("paceline.cli.plan.time.monotonic", lambda: now)
    progress = plan.Progress()
    for now, text in (  # noqa: B007
        (101.0, "reading"),
        (102.5, "predicting 1 of 9"),
        (103.0, "predicting 2 of 9"),
        (105.0, "predicting 3 of 9"),
    ):
        progress(text)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["paceline: predicting 1 of 9 ...", "paceline: predicting 3 of 9 ..."]
