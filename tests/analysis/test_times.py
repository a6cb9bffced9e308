"""Times of iterations and their phases, against the events that they are made of."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import formatting
from paceline.analysis.collection import collect
from paceline.analysis.events import IN_ITERATION, read_iterations
from paceline.analysis.phases import (
    epoch_seconds,
    exchange_seconds_in_epoch,
    explain,
    first_epoch_seconds,
    iteration_breakdown,
)
from paceline.analysis.run import open_run
from paceline.report.build import to_document
from paceline.report.document import Table
from paceline.report.sections.timing import first_iteration_note
from tests.support.marks import result_of
from tests.support.records import FakeRun, write_asynchronous, write_run
from tests.support.study_page import flat


def test_times_of_a_run_are_those_of_its_events(tmp_path: Path) -> None:
    noise = (0.0, 0.002, -0.001, 0.0005, 0.001)
    phases = [{"forward": 0.01}, {"forward": 0.01, "wait": 0.003}]
    path = write_run(tmp_path, FakeRun("a", {}, phases, iterations=123, noise=noise))
    timing = open_run(path).timing
    assert timing is not None
    for rank in timing.ranks:
        written = result_of(path)["workers"][rank.rank]["iteration_seconds"]
        for key in ("first", "mean", "median", "p95"):
            assert getattr(rank, key) == pytest.approx(written[key])
    assert timing.mean == pytest.approx(
        statistics.fmean(one["iteration_seconds"]["mean"] for one in result_of(path)["workers"])
    )


def test_iterations_done_again_after_a_resume_count_once(tmp_path: Path) -> None:
    lines = [
        {"event": "iterations", "first": 0, "seconds": [1, 2, 3, 4], "loss": [4, 3, 2, 1]},
        {"event": "iterations", "first": 2, "seconds": [5, 6], "loss": [None, 9]},
    ]
    path = tmp_path / "events-0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = read_iterations(path)
    assert message.seconds.tolist() == [1, 2, 5, 6]
    assert message.losses[:2].tolist() == [4, 3]
    assert math.isnan(message.losses[2])


def test_an_epoch_is_told_with_the_first_one_apart(tmp_path: Path) -> None:
    """50 iterations make an epoch; 12 ms each, of which 2 ms are exchange."""
    phases = [{"forward": 0.010, "exchange": 0.002}] * 2
    run = open_run(write_run(tmp_path, FakeRun("a", {}, phases, iterations=100)))
    assert epoch_seconds(run) == pytest.approx(50 * 0.012)
    assert exchange_seconds_in_epoch(run) == pytest.approx(50 * 0.002)
    assert first_epoch_seconds(run) == result_of(tmp_path / "a")["history"][0]["seconds"]


def rewrite_events(path: Path, **block: Any) -> None:
    """One block of iterations, and the end."""
    lines = [{"event": "iterations", "first": 0, **block}, {"event": "end", "status": "finished"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("is_old", [False, True])
def test_out_of_step_an_iteration_is_as_long_as_its_samples_take_all(
    is_old: bool, tmp_path: Path
) -> None:
    # 6,400 samples a second, and 64 of them in an iteration of the run; 50 of these in an epoch.
    (group,) = collect(write_asynchronous(tmp_path, "a", is_old=is_old)).groups
    assert group.iteration_means == pytest.approx([0.01])
    assert epoch_seconds(group.runs[0]) == pytest.approx(0.5)


def test_phases_explain_the_difference_of_two_cells(tmp_path: Path) -> None:
    noise = (0.0, 0.0004, -0.0003)
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, [{"forward": 0.010, "wait": 0.001}] * 2,
                                noise=noise))  # fmt: skip
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.008, "exchange": 0.010}] * 2,
                                noise=noise))  # fmt: skip
    first, second = collect(tmp_path).groups
    found = explain(first, second)
    assert found is not None
    assert found.largest == "exchange"
    assert found.by_phase["forward"] == pytest.approx(-0.002)
    assert found.by_phase["exchange"] == pytest.approx(0.010)
    assert found.by_phase["wait"] == pytest.approx(-0.001)
    assert found.seconds == pytest.approx(0.007)


def test_the_whole_split_of_a_cell_is_the_mean_of_its_workers(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", {}, [{"forward": 0.01}, {"forward": 0.03}]))
    split = iteration_breakdown(collect(path).groups[0])
    assert split is not None
    assert split.seconds["forward"] == pytest.approx(0.02)


def test_meeting_after_the_last_iteration_is_no_part_of_an_iteration(tmp_path: Path) -> None:
    """The workers exchanged for 0.2 s in five iterations, and for 0.1 s when these had ended."""
    spent = {"forward": 0.10, "exchange": 0.06}
    path = write_run(tmp_path, FakeRun("a", {}, [spent] * 2, iterations=5, is_old=True))
    phases = {**dict.fromkeys(IN_ITERATION, 0.0), "forward": 0.60, "exchange": 0.26}
    for rank in range(2):
        rewrite_events(path / f"events-{rank}.jsonl", seconds=[0.172] * 5, loss=[1.0] * 5,
                       phases=phases)  # fmt: skip
    split = iteration_breakdown(collect(path).groups[0])
    assert split is not None
    assert split.seconds["exchange"] == pytest.approx(0.26 / 5)
    assert split.total == pytest.approx(0.172)


def worker_rows(path: Path) -> list[dict[str, str]]:
    (table,) = [
        block
        for part in to_document(collect(path)).chapters[0].sections
        for block in flat(part.blocks)
        if isinstance(block, Table) and "training time" in block.columns
    ]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_parts_of_a_workers_step_time_add_up_to_it(tmp_path: Path) -> None:
    """Of four iterations, the first takes double."""
    spent = {"forward": 2.0, "backward": 0.8, "exchange": 0.04, "wait": 0.03}
    path = write_run(tmp_path, FakeRun("a", {}, [spent] * 2, iterations=4))
    for row in worker_rows(path):
        assert row["time per iteration"] == "2.87 s"
        parts = [row[name] for name in ("compute", "communication", "waiting")]
        assert parts == ["2.80 s", "40.00 ms", "30.00 ms"]


def write_blocks(path: Path, lengths: Sequence[int], first: float) -> None:
    """Events of iterations of 12 ms, of which 2 are exchange; the first takes `first` seconds."""
    lines, seconds, done = [], 0.0, 0
    for length in lengths:
        each = [0.012] * length
        each[0] = first if done == 0 else 0.012
        seconds += sum(each)
        phases = {**dict.fromkeys(IN_ITERATION, 0.0), "exchange": 0.002 * (done + length)}
        phases["forward"] = seconds - phases["exchange"]
        lines.append({"event": "iterations", "first": done, "seconds": each,
                      "loss": [1.0] * length, "phases": phases})  # fmt: skip
        done += length
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("lengths", "forward", "is_told"),
    [([1, 9], 0.010, False), ([4, 6], 0.010, False), ([10], (2.108 - 0.020) / 10, True)],
)
def test_old_records_exclude_the_first_block_of_events_and_say_where_they_cannot(
    lengths: list[int], forward: float, is_told: bool, tmp_path: Path
) -> None:
    """Ten iterations of 12 ms, but the first takes 2 s."""
    spent = {"forward": 0.010, "exchange": 0.002}
    run = FakeRun("a", {}, [spent] * 2, iterations=10, is_old=True)
    path = write_run(tmp_path, run)
    result = result_of(path)
    for worker in result["workers"]:
        worker["phases"] |= {"forward": 2.108 - 0.020, "exchange": 0.020}
    (path / "result.json").write_text(json.dumps(result))
    for rank in range(2):
        write_blocks(path / f"events-{rank}.jsonl", lengths, first=2.0)
    (group,) = collect(path).groups
    split = iteration_breakdown(group)
    assert split is not None
    assert split.seconds["forward"] == pytest.approx(forward)
    assert split.seconds["exchange"] == pytest.approx(0.002)
    (note,) = first_iteration_note([group])
    assert ("include it" in note.text) == is_told


def test_the_same_work_is_meant_in_all_of_a_table_of_differences(tmp_path: Path) -> None:
    """Two of three groups have the same batch: their difference is also per 1,000 samples."""
    for name, batch, seconds in (("a", 32, 0.010), ("b", 32, 0.011), ("c", 64, 0.030)):
        settings = {"batch_size": batch, "lr": seconds}
        run = FakeRun(name, settings, [{"forward": seconds}])
        run.more = {"samples": batch * run.iterations}
        write_run(tmp_path, run)
    document = to_document(collect(tmp_path))
    (table,) = [
        block
        for section in document.chapters[0].sections
        for block in flat(section.blocks)
        if isinstance(block, Table) and "explained" in block.columns
    ]
    rows = {row[0]: row[1] for row in table.rows}
    (near,) = [rows[label] for label in rows if "0.011" in label]
    # 1 ms for 32 samples.
    assert near == formatting.seconds(1 / 32)


def test_no_cell_lies_above_the_picture_of_the_times(tmp_path: Path) -> None:
    """A few slow iterations of one group beside many quick ones of another."""
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, [{"forward": 0.01}], iterations=1000))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 5.0}], iterations=6))
    document = to_document(collect(tmp_path))
    (figure,) = [one for one in document.figures() if one.name == "iteration-time-curve"]
    lines = re.findall(r'<polyline points="([^"]*)" class="line"', figure.svg)
    assert len(lines) == 2
    assert min(float(point.split(",")[1]) for line in lines for point in line.split()) >= 0


def test_a_run_that_was_gone_on_with_is_said_to_be(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}))
    path = write_run(tmp_path, FakeRun("b", {"lr": 0.02}))
    events = path / "events-0.jsonl"
    again = {"event": "start", "time": 0.0, "iteration": 98, "resumed": True, "workers": 1}
    done = {"event": "iterations", "first": 98, "seconds": [0.02, 0.02], "loss": [1.0, 1.0]}
    events.write_text(events.read_text() + json.dumps(again) + "\n" + json.dumps(done) + "\n")
    points = dict(to_document(collect(tmp_path)).points)
    assert points["Resumed"] == "lr 0.02 (2 sessions); wall time includes all sessions."
