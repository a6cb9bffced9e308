"""The list of the live page, and what a page learns of a run that goes on."""

from __future__ import annotations

import json
import os
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
import torch

import paceline
from paceline.analysis.collection import collect
from paceline.config import from_mapping
from paceline.errors import RecordsError
from paceline.profiler import rank_log
from paceline.records import EventWriter, RunFolder
from paceline.study.folder import Cell, Part, Study, StudyFolder
from paceline.ui.live import MAX_POINTS, Follower, downsample
from paceline.ui.run_index import SILENT_SECONDS, RunIndex
from tests.support.profiled import loader, loss_of, model
from tests.support.records import FakeRun, write_asynchronous, write_run
from tests.support.script_records import BALANCED, FakeScript, write_script
from tests.support.time_limits import time_limit


def begun(root: Path, name: str) -> RunFolder:
    return RunFolder.create(from_mapping({"out": str(root), "name": name}))


def test_runs_are_listed_with_their_outcome_and_the_newest_first(tmp_path: Path) -> None:
    done = write_run(tmp_path, FakeRun(name="done"))
    running = write_run(tmp_path, FakeRun("running", iterations=80, status="unfinished"))
    os.utime(running / "config.json")
    silent = begun(tmp_path / "deeper", "silent").path
    for file in silent.iterdir():
        os.utime(file, (0, file.stat().st_mtime - 2 * SILENT_SECONDS))
    result = json.loads((done / "result.json").read_text())
    entries = {entry.name: entry for entry in RunIndex(tmp_path).entries()}
    assert {name: entry.status for name, entry in entries.items()} == {
        "done": "finished",
        "running": "running",
        "deeper/silent": "interrupted",
    }
    assert entries["done"].accuracy == result["final"]["test_accuracy"]
    assert entries["done"].iteration_seconds == result["workers"][0]["iteration_seconds"]["mean"]
    assert entries["running"].iterations == 80
    assert entries["running"].iteration_seconds == pytest.approx(0.02)
    assert entries["deeper/silent"].iterations is None
    assert list(entries)[-1] == "deeper/silent"


@pytest.mark.parametrize("is_old", [False, True])
def test_the_list_and_the_report_agree_on_the_step_time_of_an_asynchronous_run(
    is_old: bool, tmp_path: Path
) -> None:
    path = write_asynchronous(tmp_path, "async", is_old=is_old)
    (entry,) = RunIndex(tmp_path).entries()
    assert entry.iteration_seconds == pytest.approx(0.010)
    (cell,) = collect(path).groups
    assert cell.iteration_means == [entry.iteration_seconds]


def test_the_step_time_of_an_interrupted_run_is_over_all_its_iterations(tmp_path: Path) -> None:
    """100 iterations of 20 ms in two blocks of events; those of the second take 10 ms longer."""
    run = FakeRun("one", iterations=100, noise=[0.0] * 50 + [0.010] * 50, status="unfinished")
    for file in write_run(tmp_path, run).iterdir():
        os.utime(file, (0, file.stat().st_mtime - 2 * SILENT_SECONDS))
    (entry,) = RunIndex(tmp_path).entries()
    assert (entry.status, entry.iterations) == ("interrupted", 100)
    # Without the first iteration, 49 take 20 ms and 50 take 30 ms.
    assert entry.iteration_seconds == pytest.approx((49 * 0.020 + 50 * 0.030) / 99)


def test_a_folder_that_is_a_run_itself_is_listed_and_found(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun(name="one"))
    index = RunIndex(path)
    assert [entry.name for entry in index.entries()] == ["."]
    # A browser that is led to `.` asks for nothing.
    assert index.path_of("") == path


def test_a_run_that_ends_is_read_again(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    write_run(tmp_path, FakeRun(name="one"))
    result = tmp_path / "one" / "result.json"
    kept = result.read_text()
    result.unlink()
    assert index.entries()[0].status == "running"
    result.write_text(kept)
    assert index.entries()[0].status == "finished"


def test_an_interrupted_run_that_resumes_is_running_again(tmp_path: Path) -> None:
    events = write_run(tmp_path, FakeRun("one", status="unfinished")) / "events-0.jsonl"
    for file in events.parent.iterdir():
        os.utime(file, (0, file.stat().st_mtime - 2 * SILENT_SECONDS))
    index = RunIndex(tmp_path)
    assert index.entries()[0].status == "interrupted"
    os.utime(events)
    assert index.entries()[0].status == "running"


def test_a_file_that_is_renamed_meanwhile_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Renamed:
        name = ".result.json.123"

        def is_file(self) -> bool:
            return True

        def stat(self) -> os.stat_result:
            raise FileNotFoundError

    folder = begun(tmp_path, "one")
    real = os.scandir
    listed = nullcontext([*real(folder.path), Renamed()])
    monkeypatch.setattr("paceline.ui.run_index.os.scandir", lambda path: listed)
    assert not Follower(folder.path).is_over


def test_a_study_is_running_while_a_cell_is(tmp_path: Path) -> None:
    folder = a_study(tmp_path / "deep" / "study", "a.r1")
    index = RunIndex(tmp_path)
    assert [(one.name, one.status) for one in index.entries()] == [("deep/study", "unfinished")]
    write_run(folder.cells, FakeRun("a.r1", status="unfinished"))
    entries = {one.name: one for one in index.entries()}
    assert entries["deep/study"].status == "running"
    assert entries["deep/study/cells/a.r1"].study == "deep/study"


def test_a_study_is_running_while_its_next_cell_starts(tmp_path: Path) -> None:
    folder = a_study(tmp_path / "study", "a.r1")
    index = RunIndex(tmp_path)
    with folder.locked():
        folder.write(folder.read())
        assert [one.status for one in index.entries()] == ["running"]
    assert [one.status for one in index.entries()] == ["unfinished"]


def test_damaged_records_are_named_and_affect_no_others(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun(name="good"))
    texts = {"cut": '{"schema": 1', "newer": '{"schema": 99}', "other": "[]", "deep": "[" * 100_000}
    for name, text in texts.items():
        write_run(tmp_path, FakeRun(name=name))
        (tmp_path / name / "result.json").write_text(text)
    write_run(tmp_path, FakeRun(name="endless", more={"wall_seconds": 10**400}))
    entries = {entry.name: entry for entry in RunIndex(tmp_path).entries()}
    assert [name for name, entry in entries.items() if entry.status != "damaged"] == ["good"]
    assert "newer than" in entries["newer"].cause


@pytest.mark.parametrize(
    "name", ["../outside", "/etc", "link", "..", "", "good/../../outside", "x" * 300, "\0"]
)
def test_paths_outside_the_folder_are_rejected(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    write_run(root, FakeRun(name="good"))
    outside = write_run(tmp_path, FakeRun(name="outside"))
    (root / "link").symlink_to(outside)
    index = RunIndex(root)
    assert [entry.name for entry in index.entries()] == ["good"]
    with pytest.raises(RecordsError):
        index.path_of(name)


def a_study(path: Path, *runs: str) -> StudyFolder:
    folder = StudyFolder(path)
    part = Part("one", "One", "", "", (), {})
    cells = tuple(Cell(run, "one", run, run, 1, {}, {}, run) for run in runs)
    folder.write(Study("mine", "", "Mine", "", (), (part,), cells))
    return folder


@pytest.mark.parametrize("linked", ["config.json", "events-0.jsonl", "cells", "cells/a"])
def test_links_that_leave_the_folder_are_not_followed(tmp_path: Path, linked: str) -> None:
    study = a_study(tmp_path / "runs" / "study", "a")
    path = study.path if linked.startswith("cells") else study.cells / "a"
    write_run(study.cells, FakeRun(name="a"))
    inside, outside = path / linked, tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    index = RunIndex(tmp_path / "runs")
    sent = {entry.name: entry.cause for entry in index.entries() if entry.status == "damaged"}
    assert linked in sent["study"]
    with pytest.raises(RecordsError, match="links to a path outside runs"):
        index.path_of(str(path.relative_to(index.root)))


def test_a_study_counts_the_statuses_of_its_cells(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study", "a", "b", "c", "d")
    for name, status in (("a", "finished"), ("b", "failed"), ("c", "diverged")):
        write_run(study.cells, FakeRun(name=name, status=status))
    entry = next(entry for entry in RunIndex(tmp_path).entries() if entry.kind == "study")
    assert (entry.status, entry.cause) == ("unfinished", "2 of 4 cells, 1 failed")


def test_cells_that_share_a_run_count_once(tmp_path: Path) -> None:
    study = a_study(tmp_path / "study", "a", "b", "a")
    write_run(study.cells, FakeRun(name="a"))
    entry = next(entry for entry in RunIndex(tmp_path).entries() if entry.kind == "study")
    assert (entry.status, entry.cause) == ("unfinished", "1 of 2 cells")


def test_a_follower_returns_each_complete_line_once(tmp_path: Path) -> None:
    folder = begun(tmp_path, "one")
    follower = Follower(folder.path)
    assert follower.read_update() is None
    with closing(EventWriter(folder.events_file(0))) as events:
        events.write("iterations", first=0, seconds=[0.5, 0.25], loss=[2.0, None])
        assert follower.read_update() == {"points": [[1, 2.0, 0.5], [2, None, 0.25]]}
        assert follower.read_update() is None
    with folder.events_file(0).open("a") as file:
        file.write('{"event": "evaluation", "iteration": 2, ')
        file.flush()
        assert follower.read_update() is None
        file.write('"test_accuracy": 0.5, "test_loss": 1.0}\n')
    assert follower.read_update() == {"evaluations": [(2, {"accuracy": 0.5, "loss": 1.0})]}


def test_figures_of_the_test_set_are_sent_by_name(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("one", accuracy=None, metrics={"f1": 0.8, "error": 2.0}))
    update = Follower(path).read_update()
    assert update is not None
    assert update["evaluations"] == [
        (50, {"f1": 0.4, "error": 1.0, "loss": 0.75}),
        (100, {"f1": 0.8, "error": 2.0, "loss": 0.5}),
    ]
    (entry,) = RunIndex(tmp_path).entries()
    assert (entry.accuracy, entry.test_loss) == (None, 0.5)


def test_findings_and_post_mortems_of_a_script_are_sent_once(tmp_path: Path) -> None:
    slow = FakeScript([{**BALANCED, "wait": 0.003}, {**BALANCED, "forward": 0.007}])
    report = {"event": "hang", "seconds": 61.0, "first_rank": None, "mismatches": [], "ranks": []}
    slow.more["post_mortem"] = [report]
    follower = Follower(write_script(tmp_path, slow).folder.path)
    update = follower.read_update()
    assert update is not None
    assert update["post_mortems"] == [["No rank has made progress for 61.0 s."]]
    assert update["post_mortem_title"] == "Why training stopped"
    (text, is_fault), *_ = update["findings"]
    assert text.startswith("Straggler: rank 1 on node-a takes 12.50 ms per step")
    assert is_fault
    assert follower.read_update() is None


def test_findings_of_a_running_script_are_those_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_log, "BLOCK_SHARE", 0.0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(tmp_path), name="own") as profile:
        for inputs, targets in loader(50):
            optimizer.zero_grad()
            loss = loss_of(net, inputs, targets)
            loss.backward()
            optimizer.step()
            loss.item()
        follower = Follower(profile.folder)
        update = follower.read_update()
        assert update is not None
        assert any("`Tensor.item" in text for text, _ in update["findings"])
        for event, title in [("hang", "Why training paused"), ("stop", "Why training stopped")]:
            reports = [{"event": event, "seconds": 9.0, "mismatches": [], "ranks": []}]
            (profile.folder / "post-mortem.json").write_text(json.dumps({"reports": reports}))
            monkeypatch.setattr(follower._script, "_next", 0.0)
            update = follower.read_update()
            assert update is not None
            # A script that runs may go on after a hang.
            assert update["post_mortem_title"] == title
        assert update["post_mortems"] == [["The job was stopped after 9.00 s without progress."]]


def test_the_status_of_a_run_comes_from_its_result(tmp_path: Path) -> None:
    killed = write_run(tmp_path, FakeRun("killed", status="failed", cause="killed by SIGKILL"))
    (killed / "events-0.jsonl").unlink()
    assert Follower(killed).outcome() == {"status": "failed", "cause": "killed by SIGKILL"}
    assert Follower(begun(tmp_path, "silent").path).outcome()["status"] == "interrupted"


def test_phases_exclude_startup_and_restart_after_a_resume(tmp_path: Path) -> None:
    folder = begun(tmp_path, "one")
    follower = Follower(folder.path)
    sent = []
    with closing(EventWriter(folder.events_file(0))) as events:
        for other, forward in ((9.0, 1.0), (9.5, 3.0), (4.0, 0.5), (4.0, 2.5)):
            events.write("iterations", phases={"other": other, "forward": forward})
            news = follower.read_update()
            sent.append(news and news["phases"]["0"])
    assert sent == [None, {"other": 0.5, "forward": 2.0}, None, {"other": 0.0, "forward": 2.0}]


def test_a_long_run_is_sent_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begun(tmp_path, "one")
    with closing(EventWriter(folder.events_file(0))) as events:
        for first in range(0, 20, 2):
            events.write("iterations", first=first, seconds=[0.5, 0.5], loss=[2.0, 2.0])
        events.write("warning", text="x" * 900)
        events.write("iterations", first=20, seconds=[0.5], loss=[2.0])
    monkeypatch.setattr("paceline.ui.live.MAX_BYTES", 300)
    follower = Follower(folder.path)
    sent, looks = [], 0
    while looks == 0 or follower.is_behind:
        looks += 1
        sent += [point[0] for point in (follower.read_update() or {}).get("points", [])]
    assert sent == list(range(1, 22))
    assert looks > 5


def test_values_that_are_not_numbers_are_not_sent(tmp_path: Path) -> None:
    folder = begun(tmp_path, "one")
    lines = [
        '{"event": "iterations", "first": 0, "seconds": [NaN, 0.5, "x", 0.5],'
        ' "loss": [1, 1, 1, Infinity]}',
        '{"event": "iterations", "first": "x", "seconds": [1], "loss": [1]}',
        '{"event": "iterations", "phases": {"forward": "long"}}',
        '{"event": "evaluation", "iteration": null, "test_accuracy": 0.5}',
        '{"event": "evaluation", "iteration": 1, "test_accuracy": null, "metrics": {"f1": NaN}}',
        '{"event": "evaluation", "iteration": 1, "test_loss": "low", "metrics": [1]}',
        "[" * 100_000,
    ]
    folder.events_file(0).write_text("\n".join(lines) + "\n")
    news = Follower(folder.path).read_update()
    assert news is not None
    assert news["points"] == [[2, 1, 0.5], [4, None, 0.5]]
    assert news.keys() <= {"points", "evaluations"}
    assert news.get("evaluations", []) == []
    json.dumps(news, allow_nan=False)


def test_downsampling_keeps_the_mean() -> None:
    points: list[list[float | None]] = [[i + 1, float(i), 2.0] for i in range(10 * MAX_POINTS)]
    few = downsample(points)
    assert len(few) == MAX_POINTS
    assert few[-1][0] == len(points)
    values = [value for _, value, _ in few if value is not None]
    assert sum(values) / len(few) == pytest.approx((len(points) - 1) / 2)


@pytest.mark.parametrize("name", ["result.json", "events-0.jsonl", "config.json"])
def test_a_fifo_among_the_records_does_not_block(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("whole"))
    odd = write_run(tmp_path, FakeRun("odd", status="unfinished"))
    (odd / name).unlink(missing_ok=True)
    os.mkfifo(odd / name)
    with time_limit(10):
        entries = {entry.name: entry for entry in RunIndex(tmp_path).entries()}
        news = Follower(odd).read_update()
    assert (news is None) == (name == "events-0.jsonl")
    assert entries["whole"].status == "finished"
    if name == "result.json":
        assert entries["odd"].status == "damaged"
        assert entries["odd"].cause == "cannot read result.json: not a regular file"


@pytest.mark.parametrize("name", ["result.json", "events-0.jsonl", "config.json", "notes.json"])
def test_a_symlink_loop_in_one_run_harms_no_other(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("whole"))
    odd = write_run(tmp_path, FakeRun("odd"))
    (odd / name).unlink(missing_ok=True)
    (odd / name).symlink_to(name)
    entries = {entry.name: entry for entry in RunIndex(tmp_path).entries()}
    assert entries["whole"].status == "finished"
    if name != "config.json":
        assert entries["odd"].status == "damaged"
        assert name in entries["odd"].cause
    (tmp_path / "loop").symlink_to("loop")
    for lost in ("odd", "loop"):
        with pytest.raises(RecordsError):
            RunIndex(tmp_path).path_of(lost)
