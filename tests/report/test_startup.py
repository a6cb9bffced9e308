"""The table of start-up times in a report."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.report.build import write_report
from tests.support.records import FakeRun, write_run


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
    (heading,) = [line for line in text.splitlines() if "before the first iteration" in line]
    assert [cell.strip() for cell in heading.split("|")[2:-1]] == [
        "imports", "launch", "rendezvous", "data", "model",
    ]  # fmt: skip
    (row,) = [line for line in text.splitlines() if "3.00 s" in line and "1.50 s" in line]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["3.00 s", "250.00 ms", "1.50 s", "500.00 ms", "-"]


def test_records_from_before_launch_was_measured_have_a_table(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    with_startup(path, {"imports": 2.0, "rendezvous": 1.0, "data": 0.5, "model": 0.25})
    text = write_report(path).page.with_suffix(".md").read_text()
    (row,) = [line for line in text.splitlines() if "2.00 s" in line and "1.00 s" in line]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["2.00 s", "-", "1.00 s", "500.00 ms", "250.00 ms"]


def test_waiting_for_a_gpu_has_a_column(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    parts = {"imports": 2.0, "launch": 0.0, "rendezvous": 0.0, "data": 0.5, "model": 0.25}
    with_startup(path, {**parts, "device": 1.5})
    text = write_report(path).page.with_suffix(".md").read_text()
    (heading,) = [line for line in text.splitlines() if "before the first iteration" in line]
    assert "| device |" in heading
    (row,) = [line for line in text.splitlines() if "2.00 s" in line and "1.50 s" in line]
    assert [cell.strip() for cell in row.split("|")[2:-1]][3] == "1.50 s"


def test_records_without_or_with_damaged_start_up_times_have_no_table(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    for damaged in (None, {}, {"imports": "2"}, [1.0]):
        if damaged is not None:
            with_startup(path, damaged)  # type: ignore[arg-type]
        page = write_report(path).page
        assert "before the first iteration" not in page.with_suffix(".md").read_text()
