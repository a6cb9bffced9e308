"""The table of start-up times in a report."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.report.build import write_report
from tests.support.markdown_tables import facts_below
from tests.support.records import FakeRun, write_run

HEADING = "before the first iteration"


def with_startup(path: Path, *parts: dict[str, object]) -> None:
    file = path / "result.json"
    result = json.loads(file.read_text())
    for worker, startup in zip(result["workers"], parts, strict=True):
        worker["startup_seconds"] = startup
    file.write_text(json.dumps(result))


def test_the_start_up_is_the_mean_over_the_workers(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run", phases=[{"forward": 0.01}] * 2))
    with_startup(
        path,
        {"imports": 2.0, "launch": 0.25, "rendezvous": 1.0, "data": 0.5, "model": 0.0},
        {"imports": 4.0, "launch": 0.25, "rendezvous": 2.0, "data": 0.5, "model": 0.0},
    )
    page = write_report(path).page
    text = page.with_suffix(".md").read_text()
    assert facts_below(text, HEADING) == {
        "imports": "3.00 s", "launch": "250.00 ms", "rendezvous": "1.50 s", "data": "500.00 ms",
    }  # fmt: skip


def test_records_from_before_launch_was_measured_have_a_table(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    with_startup(path, {"imports": 2.0, "rendezvous": 1.0, "data": 0.5, "model": 0.25})
    text = write_report(path).page.with_suffix(".md").read_text()
    assert facts_below(text, HEADING) == {
        "imports": "2.00 s", "rendezvous": "1.00 s", "data": "500.00 ms", "model": "250.00 ms",
    }  # fmt: skip


def test_waiting_for_a_gpu_has_a_column(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    parts = {"imports": 2.0, "launch": 0.0, "rendezvous": 0.0, "data": 0.5, "model": 0.25}
    with_startup(path, {**parts, "device": 1.5})
    text = write_report(path).page.with_suffix(".md").read_text()
    assert facts_below(text, HEADING)["device"] == "1.50 s"


def test_records_without_or_with_damaged_start_up_times_have_no_table(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    for damaged in (None, {}, {"imports": "2"}, [1.0]):
        if damaged is not None:
            with_startup(path, damaged)  # type: ignore[arg-type]
        page = write_report(path).page
        assert HEADING not in page.with_suffix(".md").read_text()
