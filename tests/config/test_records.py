"""Run folders: atomic files, appended lines, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from paceline.config import from_mapping
from paceline.errors import RecordsError, RunError
from paceline.records import (
    EventWriter,
    RunFolder,
    read_iteration_seconds,
    read_json,
    read_lines,
    write_json,
)
from tests.support.time_limits import time_limit


def config_in(folder: Path, **values: object) -> RunFolder:
    return RunFolder.create(from_mapping({"out": str(folder), **values}))


def test_a_folder_gives_its_config_back(tmp_path: Path) -> None:
    folder = config_in(tmp_path, name="one", lr=0.5)
    assert RunFolder.open(tmp_path / "one").read_config().lr == 0.5
    assert folder.read_result() is None


def test_an_existing_run_is_never_written_over(tmp_path: Path) -> None:
    config_in(tmp_path, name="one", lr=0.5)
    with pytest.raises(RecordsError, match="exists already"):
        config_in(tmp_path, name="one", lr=0.7)
    assert RunFolder.open(tmp_path / "one").read_config().lr == 0.5


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_out_that_is_a_file_is_named(below: str, tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("")
    with pytest.raises(
        RecordsError, match=f"^--out: {re.escape(str(out / below))} is not a folder$"
    ):
        config_in(out / below, name="run")


def test_runs_of_the_same_second_get_different_names(tmp_path: Path) -> None:
    assert len({config_in(tmp_path).path for _ in range(4)}) == 4


def test_a_users_own_model_gives_a_plain_folder_name(tmp_path: Path) -> None:
    assert config_in(tmp_path, model="my.models:Net").id.endswith("-Net-single")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "no schema"),
        ('{"a": 1}', "no schema"),
        ('{"schema": 99}', "newer"),
    ],
)
def test_foreign_records_are_named_and_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(RecordsError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_a_folder_without_a_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RecordsError, match="is not a run"):
        RunFolder.open(tmp_path)


def test_only_files_of_the_launcher_and_empty_output_are_transient(tmp_path: Path) -> None:
    folder = RunFolder.create(from_mapping({"out": str(tmp_path), "name": "run"}))
    transient = [folder.launch_file(0), folder.failure_file(1), folder.report_file(0)]
    for file in [*transient, folder.output_file(1)]:
        file.touch()
    folder.output_file(0).write_text("a warning")
    (folder.path / "report-final.html").write_text("a user's own file")
    folder.remove_transient()
    left = {file.name for file in folder.path.iterdir() if file.is_file()}
    assert left == {"config.json", "output-0.txt", "report-final.html"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"schema": 1, "value": "old"})
    with pytest.raises(TypeError):
        write_json(path, {"schema": 1, "value": object()})
    assert read_json(path)["value"] == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_events_go_on_after_a_line_cut_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    path.write_text('{"event": "start"}\n{"event": "iterat')
    events = EventWriter(path)
    events.write("end", status="finished")
    events.close()
    assert [event["event"] for event in read_lines(path)] == ["start", "end"]


def test_repeated_iterations_of_a_worker_that_joined_later_count_once(tmp_path: Path) -> None:
    """It was there from iteration 50 on, and the run went on from 52 after that."""
    events = EventWriter(tmp_path / "events-1.jsonl")
    events.write("iterations", first=50, seconds=[1.0, 2.0, 3.0])
    events.write("iterations", first=52, seconds=[4.0, 5.0])
    events.close()
    assert read_iteration_seconds(tmp_path / "events-1.jsonl", 54) == [1.0, 2.0, 4.0, 5.0]
    assert read_iteration_seconds(tmp_path / "events-1.jsonl", 53, since=51) == [2.0, 4.0]


def test_json_lines_are_readable_by_a_strict_reader(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events-0.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        events.write("iterations", loss=[float("nan")])
    events.close()
    assert json.dumps(list(read_lines(tmp_path / "events-0.jsonl"))) == "[]"


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """The renames and fsyncs in the order of their calls, each with the path it concerns."""
    calls: list[tuple[str, Path]] = []
    replace, fsync = os.replace, os.fsync

    def noted_replace(source: Path, target: Path) -> None:
        calls.append(("rename", Path(target)))
        replace(source, target)

    def noted_fsync(descriptor: int) -> None:
        calls.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    return calls


def test_a_record_and_its_name_are_on_the_disk_when_write_json_returns(
    tmp_path: Path, disk_calls: list[tuple[str, Path]]
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"schema": 1})
    renamed = disk_calls.index(("rename", path))
    assert any(path.name in called.name for what, called in disk_calls[:renamed])
    assert ("fsync", tmp_path) in disk_calls[renamed:]


def test_the_names_of_new_folders_are_on_the_disk_when_a_run_is_created(
    tmp_path: Path, disk_calls: list[tuple[str, Path]]
) -> None:
    config_in(tmp_path / "new" / "runs", name="one")
    synced = {path for what, path in disk_calls if what == "fsync"}
    runs = tmp_path / "new" / "runs"
    assert {tmp_path, tmp_path / "new", runs, runs / "one"} <= synced


def test_reading_a_fifo_fails_immediately(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    os.mkfifo(path)
    with (
        time_limit(10),
        pytest.raises(RecordsError, match=r"result.json: not a regular file"),
    ):
        read_json(path)


def test_events_are_not_appended_to_a_fifo(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    os.mkfifo(path)
    with time_limit(10), pytest.raises(RunError, match="not a regular file"):
        EventWriter(path)


def test_a_fifo_has_no_events(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    os.mkfifo(path)
    with time_limit(10):
        assert list(read_lines(path)) == []
