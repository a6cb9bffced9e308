"""Records that are damaged, foreign or too new: named, left out, and no harm to the others."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collection import collect
from paceline.cli import main
from paceline.records import PHASES
from paceline.report.build import to_document, write_report
from paceline.report.html import to_html
from paceline.report.terminal import MAX_SKIPPED_LINES
from tests.support.records import FakeRun, write_run
from tests.support.time_limits import time_limit

DAMAGES: dict[str, Any] = {
    "not-json": "{",
    "list": "[]",
    "newer": {"schema": 99},
    "no-keys": {"schema": 1},
    "workers-number": {"workers": 3},
    "phases-text": {"workers": [{"rank": 0, "node": 0, "samples": 1, "wall_seconds": 1,
                                 "phases": "x", "iteration_seconds": {}}]},
    "buckets-text": {"workers": [{"rank": 0, "node": 0, "samples": 1, "wall_seconds": 1,
                                  "phases": dict.fromkeys(PHASES, 1), "iteration_seconds": {},
                                  "buckets": {"count": "2", "bucket_mib": 2, "reason": ""}}]},
    "cuda-graph-text": {"workers": [{"rank": 0, "node": 0, "samples": 1, "wall_seconds": 1,
                                     "phases": dict.fromkeys(PHASES, 1), "iteration_seconds": {},
                                     "cuda_graph": "captured"}]},
    "numerics-list": {"workers": [{"rank": 0, "node": 0, "samples": 1, "wall_seconds": 1,
                                   "phases": dict.fromkeys(PHASES, 1), "iteration_seconds": {},
                                   "numerics": ["bf16"]}]},
    "config-list": {"config": []},
    "config-strange": {"config": {"nnodes": "many"}},
    "history-text": {"history": ["x"]},
    "final-text": {"final": {"test_loss": "low"}},
    "wall-null": {"wall_seconds": None},
    "wall-huge": {"wall_seconds": 1e300},
    "status-strange": {"status": "fine"},
}  # fmt: skip


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Two runs that are whole, beside one for each kind of damage."""
    for name, lr in (("one", 0.1), ("two", 0.2)):
        write_run(tmp_path, FakeRun(name, {"lr": lr}))
    whole = json.loads((tmp_path / "one" / "result.json").read_text())
    for name, damage in DAMAGES.items():
        path = write_run(tmp_path, FakeRun(name, {"lr": 0.5}))
        if isinstance(damage, dict) and "schema" not in damage:
            damage = {**whole, **damage}
        text = damage if isinstance(damage, str) else json.dumps(damage)
        (path / "result.json").write_text(text)
    return tmp_path


def test_damaged_foreign_and_newer_records_are_named_and_left_out(damaged: Path) -> None:
    report = write_report(damaged)
    page, collection = report.page, report.collection
    assert {one.name for one in collection.skipped} == set(DAMAGES)
    assert {run.id for run in collection.runs} == {"one", "two"}
    for name in DAMAGES:
        assert f"<code>{name}</code>" in page.read_text()


@pytest.mark.parametrize(
    ("command", "place"), [("report", "the end of the page"), ("compare", "the page that --html")]
)
def test_the_terminal_names_a_few_of_the_records_that_are_left_out(
    command: str, place: str, damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(damaged)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("skipped")]
    assert len(lines) == MAX_SKIPPED_LINES + 1
    assert f"and {len(DAMAGES) - MAX_SKIPPED_LINES} more: {place}" in lines[-1]


@pytest.mark.parametrize("text", ["{", '{"schema": 1, "config": {"nnodes": "many"}}'])
@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_damaged_config_is_named_though_the_result_has_a_copy(
    command: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, lr in (("one", 0.1), ("two", 0.2)):
        write_run(tmp_path, FakeRun(name, {"lr": lr}))
    (tmp_path / "two" / "config.json").write_text(text)
    assert main([command, str(tmp_path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "config.json" in line]
    assert line.startswith("skipped     two: config.json")
    assert [run.settings.get("lr") for run in collect(tmp_path).runs] == [0.1, 0.2]


def test_a_copied_run_is_named_and_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, FakeRun("one"))
    write_run(tmp_path, FakeRun("two", {"seed": 2}))
    for copied in ("another", "two-copy"):
        shutil.copytree(tmp_path / "two", tmp_path / copied)
    assert {run.id for run in collect(tmp_path).runs} == {"one", "two"}
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skipped     another: a copy of two\n" in out
    assert "skipped     two-copy: a copy of two\n" in out


def places_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value, of lists the first entry's."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places_in(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from places_in(value[0], (*path, 0))


def test_no_strange_value_anywhere_in_a_result_breaks_the_report(tmp_path: Path) -> None:
    """Such a run is shown or named as left out; the other one is always there."""
    write_run(tmp_path, FakeRun("whole", {"lr": 0.5}, iterations=4))
    run = FakeRun(
        "odd",
        {"checkpoint_every": 5, "target_accuracy": 0.5, "batch_size": 32},
        [{"forward": 0.01, "exchange": 0.002, "wait": 0.001}] * 2,
        iterations=4,
        gradient_bytes=100,
        seconds_to_target=1.0,
        checkpoints={"count": 2, "bytes": 3, "blocked_seconds": 0.1},
    )
    gpu = {"gpu": 0, "utilisation_percent_mean": 1.0, "memory_used_bytes_peak": 5}
    run.more = {
        "cluster": {
            "got": [{"what": "bandwidth out", "node": 0, "asked": 1e9, "got": 1e9, "unit": "bit/s"}]
        },
        "warnings": ["careful"],
        "restarts": [{"cause": "rank 1 was killed", "iteration": 3, "seconds": 1.5}],
        "hardware": {"cpu": "c", "cores": 2, "cpu_quota": 1.5, "memory_bytes": 9, "gpus": [gpu]},
    }
    file = write_run(tmp_path, run) / "result.json"
    whole = json.loads(file.read_text())
    for path in places_in(whole):
        if path[0] == "config" and len(path) > 1:
            continue  # `from_mapping` refuses what is wrong there.
        for strange in ("x", [3], None):
            values = copy.deepcopy(whole)
            place = values
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = strange
            file.write_text(json.dumps(values))
            collection = collect(tmp_path)
            to_html(to_document(collection))
            assert "whole" in {one.id for one in collection.runs}, path


def test_lines_of_another_shape_do_no_harm(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a"))
    before = collect(path).groups[0].iteration_means
    strange = [
        "nonsense", "[1, 2]", '{"event": "iterations"}', '{"event": 3}',
        '{"event": "iterations", "first": 0, "seconds": "x", "loss": []}',
        '{"event": "iterations", "first": "0", "seconds": [1], "loss": [1]}',
        '{"event": "iterations", "first": 999, "seconds": [1], "loss": [1]}',
        '{"event": "iterations", "first": 5, "seconds": [1, [2]], "loss": [1, 2]}',
    ]  # fmt: skip
    for name in ("events-0.jsonl", "resources-0.jsonl"):
        with (path / name).open("a") as file:
            file.write("\n".join([*strange, '{"started": "x", "seconds": null}']) + "\n")
    iteration = {"iteration": "x", "ts": 0, "dur": 5}
    trace = {"schema": 1, "rank": [], "iterations": [3, iteration], "traceEvents": [3, iteration]}
    (path / "trace-0.json").write_text(json.dumps(trace))
    (path / "comm.json").write_text('{"schema": 1, "workers": "x", "measurements": [{}]}')
    (path / "events-x.jsonl").write_text("")
    page = write_report(path).page
    assert page.is_file()
    assert collect(path).groups[0].iteration_means == before


@pytest.mark.parametrize("name", ["result.json", "events-0.jsonl", "trace-0.json"])
def test_a_fifo_among_the_records_does_not_block_the_report(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("whole", {"seed": 1}))
    odd = write_run(tmp_path, FakeRun("odd", {"seed": 2, "trace": 1}))
    (odd / name).unlink(missing_ok=True)
    os.mkfifo(odd / name)
    with time_limit(15):
        report = write_report(tmp_path)
        page, collection = report.page, report.collection
    assert "whole" in {run.id for run in collection.runs}
    assert "whole" in page.read_text()
