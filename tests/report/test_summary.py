"""The account at the end of a run, against the result that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.run import open_run
from paceline.records import Result, RunFolder
from paceline.report.summary import print_summary, unrecorded_text
from tests.support.records import FakeRun, write_asynchronous, write_run


def account(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    folder = RunFolder(write_run(tmp_path, FakeRun("run", {}, iterations=4)))
    result: Result | None = folder.read_result()
    assert result is not None
    print_summary(folder, {**result, **changes})
    # As one line each, wherever the terminal's width has broken them.
    return " ".join(capsys.readouterr().out.split())


def test_restarts_are_told_with_their_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = [
        {"cause": "rank 1 was killed by SIGKILL", "iteration": 240, "seconds": 1.0},
        {"cause": "node 1 lost", "iteration": 0, "seconds": 2.0},
    ]
    message = account(tmp_path, capsys, restarts=restarts)
    assert (
        "restarts 2: rank 1 was killed by SIGKILL (restarted from iteration 240);"
        " node 1 lost (restarted from the beginning)" in message
    )


@pytest.mark.parametrize(
    ("status", "cause", "text"),
    [
        ("failed", "python ended with exit code 7", "failed: python ended with exit code 7"),
        ("stopped", "stopped by SIGINT", "stopped by SIGINT"),
        ("finished", None, "finished"),
    ],
)
def test_the_status_of_a_script_has_its_cause(
    status: str,
    cause: str | None,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = account(tmp_path, capsys, kind="profile", status=status, cause=cause)
    assert f"status {text} test set" in message


def test_the_start_up_of_the_first_worker_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(write_run(tmp_path, FakeRun("run", {}, iterations=4)))
    result = folder.read_result()
    assert result is not None
    result["workers"][0]["startup_seconds"] = {
        "imports": 2.0, "rendezvous": 0.0, "data": 0.25, "model": 0.125,
    }  # fmt: skip
    print_summary(folder, result)
    message = " ".join(capsys.readouterr().out.split())
    assert (
        "start-up rank 0 before its first iteration:"
        " imports 2.00 s, data 250.00 ms, model 125.00 ms" in message
    )


def test_views_of_the_evaluation_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RunFolder(write_run(tmp_path / "of", FakeRun("run", {}))).read_result()
    assert result is not None
    config = {**result["config"], "eval_views": 6}
    assert "accuracy 0.9000 (mean over 6 views), loss" in account(tmp_path, capsys, config=config)
    assert "accuracy 0.9000, loss" in account(tmp_path / "plain", capsys)


def test_records_without_start_up_times_are_shown_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "start-up" not in account(tmp_path, capsys)


def test_iteration_times_are_the_mean_over_all_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(
        write_run(tmp_path, FakeRun("run", {}, [{"forward": 0.1}] * 2, iterations=4))
    )
    result = folder.read_result()
    assert result is not None
    for worker, factor in zip(result["workers"], (1, 3), strict=True):
        worker["iteration_seconds"] = {
            "median": 0.002 * factor, "mean": 0.003 * factor, "p95": 0.004 * factor, "first": None,
        }  # fmt: skip
    print_summary(folder, result)
    message = " ".join(capsys.readouterr().out.split())
    assert (
        "iterations 4; step time 4.00 ms (median), 6.00 ms (mean), 8.00 ms (p95), the first -,"
        " averaged over 2 workers" in message
    )


@pytest.mark.parametrize(("samples", "expected"), [(400, True), (None, False)])
def test_throughput_is_that_of_all_workers(
    samples: int | None, expected: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [{"forward": 0.1}] * 2
    folder = RunFolder(write_run(tmp_path, FakeRun("run", {}, phases, iterations=4)))
    result = folder.read_result()
    assert result is not None
    for worker in result["workers"]:
        worker["iteration_seconds"] = {"median": 0.04, "mean": 0.05, "p95": 0.06, "first": 1.0}
    # 100 samples in 50 ms.
    print_summary(folder, {**result, "samples": samples, "iterations": 4})
    printed = " ".join(capsys.readouterr().out.split())
    assert ("throughput 2,000 samples/s" in printed) == ("samples/s" in printed) == expected


def test_the_step_time_of_an_asynchronous_run_is_the_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(write_asynchronous(tmp_path, "run"))
    result = folder.read_result()
    assert result is not None
    print_summary(folder, result)
    message = " ".join(capsys.readouterr().out.split())
    assert "step time 10.00 ms (mean, all workers together); per worker 15.00 ms" in message


@pytest.mark.parametrize("status", ["diverged", "failed", "stopped"])
def test_a_synchronous_run_that_timed_more_iterations_than_it_counts_is_not_asynchronous(
    status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(write_run(tmp_path, FakeRun("run", iterations=4, status=status)))
    result = folder.read_result()
    assert result is not None
    result["iterations"] = 3
    folder.write_result(result)
    print_summary(folder, result)
    message = " ".join(capsys.readouterr().out.split())
    assert "iterations 3; step time 20.00 ms (median), 20.00 ms (mean)," in message
    assert open_run(folder.path).iteration_seconds == pytest.approx(0.02)


def test_overlapped_communication_that_was_not_measured_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun("run", {}, [{"forward": 0.1}] * 2, iterations=4, hidden=None)
    folder = RunFolder(write_run(tmp_path, run))
    result = folder.read_result()
    assert result is not None
    print_summary(folder, result)
    message = " ".join(capsys.readouterr().out.split())
    assert "overlapped communication was not measured" in message


@pytest.mark.parametrize("count", [1, 3])
def test_the_machine_whose_resources_are_shown_is_named_where_there_are_several(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"cpu_percent_mean": 50.0, "rss_bytes_mean": 1e6, "rss_bytes_peak": 2e6}
    message = account(tmp_path, capsys, nodes=[node] * count)
    assert ("peak; the first of 3 machines" in message) == (count == 3)


@pytest.mark.parametrize(
    ("percent", "text"), [(172.0, "CPU 1.72 of 2 cores mean,"), (None, "CPU - mean,")]
)
def test_cpu_use_is_shown_in_cores(
    percent: float | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {"cpu_percent_mean": percent, "rss_bytes_mean": 1e6, "rss_bytes_peak": 2e6}
    assert f"resources {text}" in account(tmp_path, capsys, nodes=[node])


@pytest.mark.parametrize(("machine_percent", "is_told"), [(97.0, True), (15.0, False)])
def test_cpu_use_of_other_processes_is_a_warning(
    machine_percent: float, is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two cores, of which the run uses a tenth of one: 5 % of the machine."""
    node = {"cpu_percent_mean": 10.0, "machine_cpu_percent_mean": machine_percent,
            "rss_bytes_mean": 1e6, "rss_bytes_peak": 2e6}  # fmt: skip
    message = account(tmp_path, capsys, nodes=[node])
    line = "warning other processes used 92% of the CPU; timings are not representative"
    assert (line in message) == is_told
    assert ("other processes" in message) == is_told


@pytest.mark.parametrize("changes", [{}, {"workers": []}])
def test_each_warning_has_a_row(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = account(
        tmp_path, capsys, warnings=["the link is slow", "the disk is full"], **changes
    )
    assert "warning the link is slow warning the disk is full" in message


def test_an_undisturbed_run_has_no_such_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = account(tmp_path, capsys)
    assert "restarts" not in message
    assert "warning" not in message


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([7.5, 0.75], "the last 7.50 s of rank 0, 750.00 ms of rank 1: `wait` in a collective that"
         " others never called, else `other`"),
        ([7.5], "the last 7.50 s of rank 0: `other`"),
        ([0.5, 0.5], ""),
    ],
)  # fmt: skip
def test_all_ranks_that_were_killed_are_listed(seconds: list[float], expected: str) -> None:
    workers = [{"rank": rank, "unrecorded_seconds": one} for rank, one in enumerate(seconds)]
    assert unrecorded_text(workers) == expected


def test_what_was_not_evaluated_has_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = {"train_loss": 0.25, "test_loss": None, "test_accuracy": None}
    message = account(tmp_path, capsys, final=final)
    assert "test set" not in message
    assert "training loss 0.2500" in message
