"""Runs whose number of workers changed: figures are since then, curves of the whole run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.communication import all_reduce_bandwidth, run_traffic
from paceline.analysis.events import IN_ITERATION
from paceline.analysis.phases import (
    breakdown_by_rank,
    exchange_seconds_in_epoch,
    run_overlapped_seconds,
)
from paceline.analysis.ranks import rank_work
from paceline.analysis.run import Run, open_run
from paceline.analysis.world_sizes import WorldSize, worlds_of
from paceline.report.build import to_document
from paceline.report.comparison import result_rows
from paceline.report.document import BulletList
from paceline.report.markdown import to_markdown
from tests.support.records import FakeRun, write_run

GRADIENT_BYTES = 1000


def begun(iteration: int, count: int) -> dict[str, Any]:
    return {"event": "start", "iteration": iteration, "resumed": iteration > 0, "workers": count}


def block(first: int, count: int, phases: Mapping[str, float]) -> dict[str, Any]:
    """Iterations of so long phases, as the first ones of a process."""
    spent = dict.fromkeys(IN_ITERATION, 0.0) | {key: count * one for key, one in phases.items()}
    return {"event": "iterations", "first": first, "seconds": [sum(phases.values())] * count,
            "loss": [1.0] * count, "phases": spent}  # fmt: skip


def write_lines(path: Path, *lines: Mapping[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


BEFORE = {"forward": 0.010}
ALONE = {"forward": 0.020}
AFTER = ({"forward": 0.010, "exchange": 0.002}, {"forward": 0.011, "exchange": 0.003})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two workers, of which one is lost after iteration 60; one goes on from the checkpoint of
    50, and from 80 on there are two again, up to 100."""
    fake = FakeRun("a", {"strategy": "ring"}, AFTER, gradient_bytes=GRADIENT_BYTES, is_old=True)
    path = write_run(tmp_path, fake)
    write_lines(
        path / "events-0.jsonl",
        begun(0, 2), block(0, 60, BEFORE),
        begun(50, 1), block(50, 32, ALONE),
        begun(80, 2), block(80, 20, AFTER[0]), {"event": "end"},
    )  # fmt: skip
    write_lines(
        path / "events-1.jsonl",
        begun(0, 2), block(0, 60, BEFORE), begun(80, 2), block(80, 20, AFTER[1]), {"event": "end"},
    )  # fmt: skip
    result = json.loads((path / "result.json").read_text())
    first, second = result["workers"]
    first["phases"] |= {"forward": 50 * 0.010 + 30 * 0.020 + 20 * 0.010, "exchange": 20 * 0.002}
    second["phases"] |= {"forward": 20 * 0.011, "exchange": 20 * 0.003}
    for worker in (first, second):
        worker["samples"] = 20 * 32
    (path / "result.json").write_text(json.dumps(result))
    return open_run(path)


def test_times_are_of_the_iterations_since_the_last_change(run: Run) -> None:
    assert run.worlds == [WorldSize(0, 2), WorldSize(50, 1), WorldSize(80, 2)]
    assert run.timing is not None
    assert [(rank.rank, rank.count) for rank in run.timing.ranks] == [(0, 20), (1, 20)]
    assert run.iteration_seconds == pytest.approx((0.012 + 0.014) / 2)
    assert run.timing.blocks == pytest.approx([0.013] * len(run.timing.blocks))


def test_the_curve_has_each_iteration_as_the_workers_that_were_left_did_it(run: Run) -> None:
    assert run.timing is not None
    curve = run.timing.seconds
    assert curve.x.tolist() == list(range(2, 101))
    # What the lost worker did after the checkpoint was done again by the other alone.
    assert curve.middle == pytest.approx([0.010] * 49 + [0.020] * 30 + [0.013] * 20)
    assert len(run.timing.loss) == 100


def test_phases_are_of_the_same_iterations_as_the_times(run: Run) -> None:
    for rank, split in breakdown_by_rank(run).items():
        assert split.seconds["forward"] == pytest.approx(AFTER[rank]["forward"])
        assert split.seconds["exchange"] == pytest.approx(AFTER[rank]["exchange"])


def test_recorded_phases_of_the_later_iterations_are_preferred_to_those_of_events(run: Run) -> None:
    result = json.loads(run.folder.result_file.read_text())
    for worker in result["workers"]:
        phases = dict.fromkeys(IN_ITERATION, 0.0) | {"forward": 19 * 0.5, "wait": 19 * 0.25}
        worker["after_first"] = {
            "iterations": 19, "phases": phases, "hidden_exchange_seconds": 19 * 0.125,
        }  # fmt: skip
    run.folder.write_result(result)
    again = open_run(run.folder.path)
    for split in breakdown_by_rank(again).values():
        assert (split.seconds["forward"], split.seconds["wait"]) == (0.5, 0.25)
    assert run_overlapped_seconds(again) == 0.125
    assert run_overlapped_seconds(run) is None, "the sum is of unlike iterations"


def test_exchange_in_an_epoch_is_of_the_iterations_since_the_last_change(run: Run) -> None:
    assert exchange_seconds_in_epoch(run) == pytest.approx(50 * (0.002 + 0.003) / 2)


def test_traffic_of_unlike_iterations_is_not_told_by_iteration(run: Run) -> None:
    assert run_traffic(run)["gradients"].bytes_sent == 200 * GRADIENT_BYTES
    assert run_traffic(run)["gradients"].bytes_per_iteration is None
    assert {worker.moved_bytes for worker in rank_work(run)} == {None}
    assert all_reduce_bandwidth(collect(run.folder.path).groups[0]) is None


def test_samples_of_a_worker_are_of_the_iterations_that_its_time_is_of(run: Run) -> None:
    second = rank_work(run)[1]
    assert second.samples == 20 * 32
    assert second.training_seconds == pytest.approx(20 * 0.014)


def test_the_page_says_what_its_figures_are_of(run: Run) -> None:
    document = to_document(collect(run.folder.path))
    assert "timings cover the last world size only" in dict(document.points)["Workers changed"]
    sections = document.chapters[0].sections
    lists = [one for section in sections for one in section.blocks if isinstance(one, BulletList)]
    message = [item for one in lists for item in one.items]
    (text,) = [text for lead, text in message if "number of workers changed" in lead]
    assert text.startswith(
        "2 workers at first, 1 worker from iteration 50 on, 2 workers from iteration 80 on."
    )
    assert "cover the last world size only" in to_markdown(document)


def test_a_comparison_says_that_the_number_changed(run: Run) -> None:
    rows = {row.name: row.cells for row in result_rows(collect(run.folder.path).groups)}
    assert rows["workers changed"][0].startswith("2 workers at first, 1 worker from iteration 50")


def test_a_restart_with_as_many_workers_changes_nothing() -> None:
    """Nor does an attempt with fewer that never came to a checkpoint."""
    assert worlds_of([(0, 2), (50, 2)]) == [WorldSize(0, 2)]
    assert worlds_of([(0, 2), (50, 1), (50, 2)]) == [WorldSize(0, 2)]
    assert worlds_of([(0, 2), (0, 1)]) == [WorldSize(0, 1)]


def test_a_rank_whose_first_holder_was_lost_with_its_records_is_not_left_out(
    tmp_path: Path,
) -> None:
    path = write_run(tmp_path, FakeRun("a", {}, [BEFORE, ALONE]))
    write_lines(path / "events-0.jsonl", begun(0, 2), block(0, 100, BEFORE), {"event": "end"})
    write_lines(path / "events-1.jsonl", begun(40, 2), block(40, 60, ALONE), {"event": "end"})
    timing = open_run(path).timing
    assert timing is not None
    assert [(rank.rank, rank.count) for rank in timing.ranks] == [(0, 100), (1, 60)]


def test_out_of_step_samples_and_iterations_are_since_the_same_change(tmp_path: Path) -> None:
    """Since two workers became one of 10 ms with 32 samples each, 32 take 10 ms."""
    path = write_run(tmp_path, FakeRun("a", {}, [BEFORE]))
    write_lines(
        path / "events-0.jsonl",
        begun(0, 2), block(0, 70, ALONE), begun(50, 1), block(70, 100, BEFORE), {"event": "end"},
    )  # fmt: skip
    write_lines(path / "events-1.jsonl", begun(0, 2), block(0, 30, ALONE))
    result = json.loads((path / "result.json").read_text())
    result["workers"][0] |= {"samples": 100 * 32, "staleness": {}}
    result |= {"iterations": 150, "samples": 150 * 32}
    (path / "result.json").write_text(json.dumps(result))
    assert open_run(path).iteration_seconds == pytest.approx(0.010)
