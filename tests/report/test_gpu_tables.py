"""How busy GPUs were: what the driver sampled, and the kernel time of traced iterations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.report.build import write_report
from tests.support.markdown_tables import facts_below
from tests.support.records import FakeRun, write_run

GPU = {
    "gpu": 0,
    "utilisation_percent_mean": 41.0,
    "utilisation_percent_training_mean": 93.0,
    "memory_used_bytes_peak": 3 << 30,
    "power_watts_mean": 310.0,
}


def page_of(
    tmp_path: Path, gpu: dict[str, Any] | None, kernel_time: Any, copies: Any = None
) -> str:
    path = write_run(tmp_path, FakeRun("run"))
    file = path / "result.json"
    result = json.loads(file.read_text())
    result["nodes"][0]["gpus"] = [gpu] if gpu else []
    result["workers"][0]["kernel_time"] = kernel_time
    result["workers"][0]["host_to_device"] = copies
    result["iterations"] = 100
    file.write_text(json.dumps(result))
    return write_report(path).page.with_suffix(".md").read_text()


def test_gpu_has_a_busy_share_of_training_and_of_the_whole_run(tmp_path: Path) -> None:
    row = facts_below(page_of(tmp_path, GPU, None), "GPU 0")
    assert (row["NVML busy, training"], row["NVML busy, whole run"]) == ("93%", "41%")
    assert row["power, mean"] == "310 W"


def test_gpu_of_an_older_record_has_the_busy_share_of_the_whole_run(tmp_path: Path) -> None:
    older = {key: value for key, value in GPU.items() if "training" not in key}
    row = facts_below(page_of(tmp_path, older, None), "GPU 0")
    assert "NVML busy, training" not in row
    assert row["NVML busy, whole run"] == "41%"


def test_kernel_time_is_a_share_of_the_traced_iterations(tmp_path: Path) -> None:
    traced = {"iterations": 20, "seconds": 0.05, "window_seconds": 0.0625}
    page = page_of(tmp_path, GPU, traced)
    row = facts_below(page, "traced iterations")
    assert (row["iterations"], row["kernel time each"]) == ("20", "2.50 ms")
    assert row["kernel time, share"] == "80.0%"


def test_without_or_with_damaged_kernel_time_there_is_no_table(tmp_path: Path) -> None:
    damaged: tuple[Any, ...] = ({}, {"iterations": 0, "seconds": 1, "window_seconds": 1}, "1", None)
    for number, kernel_time in enumerate(damaged):
        page = page_of(tmp_path / str(number), None, kernel_time)
        assert "traced iterations" not in page


def test_copies_to_the_gpu_are_shown_per_iteration(tmp_path: Path) -> None:
    copies = {"count": 200, "bytes": 100 << 20, "pageable_bytes": 50 << 20, "seconds": 0.1,
              "gpu_seconds": 0.05}  # fmt: skip
    row = facts_below(page_of(tmp_path, GPU, None, copies), "copies to the GPU")
    assert (row["per iteration"], row["bytes"]) == ("2.0", "1.0 MB")
    assert (row["from pageable memory"], row["program"], row["GPU"]) == (
        "50.0%",
        "1.00 ms",
        "500 us",
    )


def test_copies_are_divided_by_the_iterations_in_which_they_were_counted(tmp_path: Path) -> None:
    copies = {"iterations": 400, "count": 800, "bytes": 400 << 20, "pageable_bytes": 0,
              "seconds": 0.4, "gpu_seconds": 0.2}  # fmt: skip
    row = facts_below(page_of(tmp_path, GPU, None, copies), "copies to the GPU")
    assert (row["per iteration"], row["bytes"], row["program"]) == ("2.0", "1.0 MB", "1.00 ms")


def test_without_or_with_damaged_copies_there_is_no_table(tmp_path: Path) -> None:
    for number, copies in enumerate(({}, {"count": 1, "bytes": 0}, "1", None)):
        page = page_of(tmp_path / str(number), None, None, copies)
        assert "copies to the GPU" not in page
