"""Runs that `paceline train` did not start: their settings are mostly unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.run import open_run
from paceline.cli import main
from paceline.config import from_mapping
from paceline.errors import RecordsError
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.summary import print_summary
from paceline.study.folder import Cell, StudyFolder
from paceline.study.runner import State, state_of
from paceline.ui.run_index import RunIndex
from paceline.ui.server import _summary
from tests.support.records import FakeRun, write_run

COMMAND = ["torchrun", "--nproc-per-node", "2", "train.py", "--lr", "0.1"]
TWO = [{"forward": 0.01, "exchange": 0.002}] * 2


def profiled(folder: str = "profiled", **values: object) -> FakeRun:
    return FakeRun(folder, {"command": COMMAND, **values}, TWO, kind="profile", hidden=None)


def joined(name: str = "joined", strategy: str = "overlap") -> FakeRun:
    settings = {"command": ["own_loop.py"], "strategy": strategy, "options": {}}
    return FakeRun(name, settings, TWO, kind="join")


def write_all(root: Path) -> Path:
    for run in (profiled(), joined(), FakeRun("trained", {}, TWO)):
        write_run(root, run)
    return root


def test_records_of_a_profiled_script_hold_only_what_is_known(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, profiled()))
    assert (run.settings.kind, run.settings.workers, run.settings.nnodes) == ("profile", 2, 1)
    assert run.settings.script == "train.py"
    unknown = ("strategy", "model_text", "data", "global_batch_size", "target", "threads")
    assert [getattr(run.settings, name) for name in unknown] == [None] * len(unknown)
    record = json.loads((tmp_path / "profiled" / "config.json").read_text())
    assert record["kind"] == "profile"
    assert record["config"] == {"command": COMMAND, "world_size": 2, "nnodes": 1}


def test_a_record_without_a_kind_is_of_paceline_train(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("old"))
    for file in (path / "config.json", path / "result.json"):
        record = json.loads(file.read_text())
        del record["kind"]
        file.write_text(json.dumps(record))
    assert open_run(path).settings.kind == "train"
    assert RunFolder(path).read_config().strategy == "single"


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("newer", status="unfinished"))
    record = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**record, "kind": "dreamed"}))
    with pytest.raises(RecordsError, match="kind: must be one of train, join, profile"):
        open_run(path)


def test_a_script_that_is_still_running_has_as_many_workers_as_wrote_events(tmp_path: Path) -> None:
    path = write_run(tmp_path, profiled())
    (path / "result.json").unlink()
    record = json.loads((path / "config.json").read_text())
    del record["config"]["world_size"]
    (path / "config.json").write_text(json.dumps(record))
    assert open_run(path).settings.workers == 2


@pytest.mark.parametrize("path", ["profiled", "joined", "."])
def test_pages_show_runs_of_any_kind(tmp_path: Path, path: str) -> None:
    write_all(tmp_path)
    assert main(["report", str(tmp_path / path)]) == 0
    page = (tmp_path / path / "report.md").read_text()
    assert "None" not in page
    assert "exposed communication" in page
    if path == "profiled":
        assert "lenet" not in page
        assert "paceline profile -- torchrun --nproc-per-node 2 train.py --lr 0.1" in page


def test_labels_name_the_kind_only_where_kinds_differ(tmp_path: Path) -> None:
    write_all(tmp_path / "mixed")
    assert {group.label for group in collect(tmp_path / "mixed").groups} == {
        "allreduce",
        "join: own_loop.py, overlap",
        "profile: train.py",
    }
    for name in ("ddp", "overlap"):
        write_run(tmp_path / "joined", joined(name, name))
    assert [group.label for group in collect(tmp_path / "joined").groups] == ["ddp", "overlap"]


def test_a_profile_is_labeled_with_its_name_else_its_script(tmp_path: Path) -> None:
    write_run(tmp_path, profiled("a", name="baseline"))
    (group,) = collect(tmp_path).groups
    assert group.label == "baseline"
    # Repeats with different names.
    write_run(tmp_path, profiled("b", name="again"))
    (group,) = collect(tmp_path).groups
    assert group.label == "train.py"
    # Another command of the same script.
    write_run(tmp_path, profiled("c", command=["torchrun", "train.py"]))
    labels = [group.label for group in collect(tmp_path).groups]
    assert labels == ["torchrun --nproc-per-node 2 train.py --lr 0.1", "torchrun train.py"]


def test_a_module_is_the_script(tmp_path: Path) -> None:
    command = ["python", "-m", "torch.distributed.run", "-m", "package.train", "--lr", "1"]
    path = write_run(tmp_path, profiled(command=command))
    assert open_run(path).settings.script == "package.train"


def test_a_page_of_one_run_has_nothing_to_compare(tmp_path: Path) -> None:
    page_path = write_report(write_run(tmp_path, profiled(name="mine"))).page
    page = page_path.with_suffix(".md").read_text()
    assert "onfiguration" not in page.replace("Configuration and machine", "")
    assert "| status | finished |" in page
    assert "repeats" not in page
    # Labels of charts have the rank, not the name of the run.
    assert '">rank 1<' in page_path.read_text()


def test_runs_of_different_kinds_are_compared_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path)
    names = ("trained", "joined", "profiled")
    page = tmp_path / "page.html"
    arguments = [str(tmp_path / name) for name in names]
    assert main(["compare", *arguments, "--html", str(page)]) == 0
    rows = {line[:18].strip(): line[18:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["kind"] == ["train", "join", "profile"]
    assert rows["iteration, mean"] == ["12.00", "ms"] * 3
    assert rows["test accuracy"] == ["0.9000", "-", "-"]
    assert rows["training loss"] == ["0.4000", "0.4000", "-"]
    # Settings that only one kind has are no difference.
    assert "lr" not in rows
    assert page.stat().st_size


def test_profiled_runs_of_one_script_are_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, profiled("slow"))
    write_run(tmp_path, profiled("fast", command=["torchrun", "train.py"]))
    assert main(["compare", str(tmp_path / "slow"), str(tmp_path / "fast")]) == 0
    assert "No clear winner: slow took 12.00 ms per iteration" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("run", [profiled(), joined()], ids=["profile", "join"])
def test_the_terminal_summary_omits_what_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: FakeRun
) -> None:
    folder = RunFolder(write_run(tmp_path, run))
    result = folder.read_result()
    assert result is not None
    result |= {"nodes": [], "measurement_overhead": {}}
    print_summary(folder, result)
    output = capsys.readouterr().out
    assert "step time 12.00 ms" in " ".join(output.split())
    assert not any(word in output for word in ("test set", "resources", "measuring", "None"))


def test_the_live_page_lists_runs_of_any_kind(tmp_path: Path) -> None:
    entries = {entry.name: entry for entry in RunIndex(write_all(tmp_path)).entries()}
    assert {entry.status for entry in entries.values()} == {"finished"}
    one = entries["profiled"]
    assert (one.model, one.script, one.strategy, one.workers) == ("", "train.py", "", 2)
    kind, total, facts = _summary(tmp_path / "joined")
    assert (kind, total) == ("join", None)
    assert facts.replace("\u00a0", " ") == "own_loop.py · overlap · 2 workers"


@pytest.mark.parametrize("run", [profiled("a.r1"), joined("a.r1")], ids=["profile", "join"])
def test_a_study_does_not_take_other_runs_for_its_cells(tmp_path: Path, run: FakeRun) -> None:
    study, cell = StudyFolder(tmp_path), Cell("a.r1", "a", "a", "a", 1, {}, {}, "a.r1")
    write_run(study.cells, run)
    assert state_of(study, cell, from_mapping({})) is State.RERUN
    with pytest.raises(RecordsError, match="is not a run of `paceline train`"):
        study.status(cell)


def test_only_runs_of_paceline_train_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, joined())
    assert main(["train", "--resume", str(path)]) == 2
    assert "choose a run of `paceline train`" in capsys.readouterr().err
