"""The page and its twin: what is in them, what is left out, and that nothing breaks them."""

from __future__ import annotations

import argparse
import copy
import json
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.cli.flags import add_config_flags, given_flags
from paceline.config import from_mapping
from paceline.report.build import to_document, write_report
from paceline.report.collection import collect
from paceline.report.html import to_html
from paceline.report.phases import explain
from paceline.report.run import open_run
from paceline.report.section.configuration import command, where_to_type
from paceline.report.sections import SECTIONS
from paceline.report.verdict import judge
from paceline.study.folder import Cell, Part, Study, StudyFolder, Trouble
from report.records import FakeRun, write_repeats, write_run

VOID = ("meta", "input", "br", "link")


class Outline(HTMLParser):
    """Refuses tags that are not closed in order, and collects what the tests ask about."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if values.get("id") else []
        self.sources += [value for key, value in attrs if key in ("src", "srcset") and value]
        self.links += [values["href"] or ""] if values.get("href") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two strategies with two repeats each, beside one worker."""
    spent = {"forward": 0.01, "backward": 0.01, "exchange": 0.004}
    for strategy, factor in (("overlap", 1.0), ("gather_scatter", 1.3)):
        run = FakeRun(strategy, {"strategy": strategy}, [spent] * 2, gradient_bytes=1000)
        write_repeats(tmp_path / "runs", run, (factor, factor * 1.01))
    write_run(tmp_path / "runs", FakeRun("alone"))
    return tmp_path / "runs"


def test_the_page_is_one_whole_file_that_asks_for_nothing_else(folder: Path) -> None:
    page, _ = write_report(folder)
    text = page.read_text()
    outline = Outline(text)
    assert outline.sources == []
    assert "@import" not in text
    assert "url(" not in text
    assert len(outline.ids) == len(set(outline.ids))
    for link in outline.links:
        if link.startswith("#"):
            assert link[1:] in outline.ids
        else:
            assert (page.parent / link).is_file()
    for place in re.findall(r"https?://[^\s\"'<]+", text):
        assert place == "http://www.w3.org/2000/svg", "the name of SVG is no address to fetch"


def test_the_verdict_comes_first_in_both(folder: Path) -> None:
    page, _ = write_report(folder)
    for file in (page, page.with_suffix(".md")):
        text = file.read_text()
        assert text.index("Verdict") < text.index("All cells")
    assert "What to try next" in page.read_text()


def test_every_figure_is_a_file_beside_the_markdown(folder: Path) -> None:
    page, _ = write_report(folder)
    named = re.findall(r"\]\((report-figures/[^)]+)\)", page.with_suffix(".md").read_text())
    files = {str(path.relative_to(folder)) for path in (folder / "report-figures").iterdir()}
    assert set(named) == files
    assert len(named) > 10
    assert all("prefers-color-scheme: dark" in (folder / name).read_text() for name in named)


def test_the_same_records_make_the_same_page(folder: Path) -> None:
    first = write_report(folder)[0].read_bytes()
    assert write_report(folder)[0].read_bytes() == first


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("<script>alert(1)<b>", {"model": "a.b:<img src=x>"}))
    write_run(tmp_path, FakeRun("two", {"model": "a.b:|_c_|"}, status="failed", cause="<i>&`x`"))
    page, _ = write_report(tmp_path)
    outline = Outline(page.read_text())
    assert outline.sources == []
    assert "<script>alert" not in page.read_text()
    markdown = re.sub(r"```.*?```", "", page.with_suffix(".md").read_text(), flags=re.S)
    assert re.findall(r"(?<!\\)<", markdown) == []


DAMAGES: dict[str, Any] = {
    "not-json": "{",
    "list": "[]",
    "newer": {"schema": 99},
    "no-keys": {"schema": 1},
    "workers-number": {"workers": 3},
    "phases-text": {"workers": [{"rank": 0, "node": 0, "samples": 1, "wall_seconds": 1,
                                 "phases": "x", "iteration_seconds": {}}]},
    "config-list": {"config": []},
    "config-strange": {"config": {"nnodes": "many"}},
    "history-text": {"history": ["x"]},
    "final-text": {"final": {"test_loss": "low"}},
    "wall-null": {"wall_seconds": None},
    "status-strange": {"status": "fine"},
}  # fmt: skip


def test_damaged_foreign_and_newer_records_are_named_and_left_out(folder: Path) -> None:
    whole = json.loads((folder / "alone" / "result.json").read_text())
    for name, damage in DAMAGES.items():
        path = write_run(folder, FakeRun(name, {"lr": 0.5}))
        if isinstance(damage, dict) and "schema" not in damage:
            damage = {**whole, **damage}
        text = damage if isinstance(damage, str) else json.dumps(damage)
        (path / "result.json").write_text(text)
    page, collection = write_report(folder)
    assert {one.name for one in collection.left_out} == set(DAMAGES)
    assert {run.id for run in collection.runs} == {
        "alone", "overlap-0", "overlap-1", "gather_scatter-0", "gather_scatter-1",
    }  # fmt: skip
    for name in DAMAGES:
        assert f"<code>{name}</code>" in page.read_text()


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
    before = collect(path).cells[0].iteration_means
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
    lap = {"iteration": "x", "ts": 0, "dur": 5}
    trace = {"schema": 1, "rank": [], "iterations": [3, lap], "traceEvents": [3, lap]}
    (path / "trace-0.json").write_text(json.dumps(trace))
    (path / "comm.json").write_text('{"schema": 1, "workers": "x", "measurements": [{}]}')
    (path / "events-x.jsonl").write_text("")
    page, _ = write_report(path)
    assert page.is_file()
    assert collect(path).cells[0].iteration_means == before


def test_runs_that_did_not_finish_are_shown_with_their_cause(folder: Path) -> None:
    write_run(folder, FakeRun("cut", {"lr": 0.3}, status="failed", cause="the cable was cut"))
    write_run(folder, FakeRun("going", {"lr": 0.4}, status="unfinished"))
    text = write_report(folder)[0].read_text()
    assert "cut: failed.</b> the cable was cut" in text
    assert "going: unfinished.</b> no result.json" in text


def write_study(root: Path) -> StudyFolder:
    """Two parts; the first asks for its sections in an order of its own."""
    folder = StudyFolder(root / "study")
    cells = []
    for part, rates in (("one", (0.01, 0.02)), ("two", (0.01, 0.03))):
        for rate in rates:
            name = f"{part}.lr-{rate}"
            run = "one.lr-0.01" if rate == 0.01 else name
            trouble = Trouble("skipped", "needs a GPU") if rate == 0.03 else None
            cells.append(
                Cell(f"{name}.r1", part, name, f"rate {rate}", 1, {"lr": str(rate)},
                     {"lr": rate}, run, trouble=trouble)
            )  # fmt: skip
            if not trouble and not (folder.cells / run).exists():
                write_run(folder.cells, FakeRun(run, {"lr": rate}))
    parts = (
        Part("one", "The first part", "What does it ask?", "Others found 3.",
             ("phases", "curves", "no_such"), {"lr": ("0.01", "0.02")}),
        Part("two", "The second part", "", "", (), {"lr": ("0.01", "0.03")}),
    )  # fmt: skip
    folder.write(Study("rates", "small", "Two rates", "About rates.", ("traffic",), parts,
                       tuple(cells)))  # fmt: skip
    return folder


def test_a_study_is_told_part_by_part_with_the_sections_it_wants(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    page, collection = write_report(folder.path)
    text = page.read_text()
    assert collection.title == "Two rates"
    assert "What does it ask?" in text
    assert "Others found 3." in text
    first = text[text.index('<article id="the-first-part"') : text.index('id="the-second-part"')]
    titles = re.findall(r"<h3>(.*?)</h3>", first)
    wanted = [SECTIONS[name].title for name in ("overview", "phases", "curves")]
    assert titles == ["Verdict", *wanted]
    last = text[text.index('<article id="all-parts"') :]
    assert re.findall(r"<h3>(.*?)</h3>", last) == [SECTIONS["configuration"].title]
    assert "No such section: no_such" in first
    assert "skipped: needs a GPU" in text, "a cell without a run is named with its cause"


def test_a_run_of_two_cells_is_read_once(tmp_path: Path) -> None:
    collection = collect(write_study(tmp_path).path)
    assert [run.id for run in collection.runs] == ["one.lr-0.01", "one.lr-0.02"]


def test_report_tells_the_verdict_and_where_the_page_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    out = capsys.readouterr().out
    assert "fastest" in out
    assert str(tmp_path / "page" / "report.html") in out
    assert (tmp_path / "page" / "report.html").is_file()


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_path_without_runs_is_refused_in_a_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "place"
    if kind == "empty":
        path.mkdir()
    if kind == "file":
        path.write_text("")
    assert main(["report", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_the_command_of_a_run_repeats_its_settings(tmp_path: Path) -> None:
    settings = {
        "strategy": "overlap", "options": {"codec": "fp16", "bucket_mib": "1"}, "lr": 0.2,
        "augment": "crop,flip", "reshuffle": False, "sync_bn": True, "target_accuracy": 0.9,
        "schedule": "steps", "lr_steps": "1e-2:10,1e-3:10",
    }  # fmt: skip
    config = open_run(write_run(tmp_path, FakeRun("a", settings, [{"forward": 0.1}] * 2))).config
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    words = shlex.split(command(config))
    assert words[:2] == ["paceline", "train"]
    again = from_mapping(given_flags(parser.parse_args(words[2:])))
    assert {**again.to_dict(), "out": config.out, "name": config.name} == config.to_dict()


def test_the_command_of_a_run_in_a_cluster_is_what_its_user_typed() -> None:
    settled = {"cluster": "nodes=2", "nnodes": 2, "master_addr": "10.77.0.1", "name": "a"}
    assert command(from_mapping(settled)) == "paceline train --cluster nodes=2"


def test_a_command_for_several_machines_says_where_to_type_it() -> None:
    by_hand = {"nnodes": 2, "master_addr": "one", "node_rank": 1}
    assert command(from_mapping(by_hand)) == "paceline train --nnodes 2 --master-addr one"
    assert (
        where_to_type(from_mapping(by_hand)) == " (on each of the 2 machines, with its --node-rank)"
    )
    assert where_to_type(from_mapping({"hosts": "one,two"})) == ""


SMALL = ["--train-samples", "64", "--test-samples", "32", "--batch-size", "16", "--threads", "1",
         "--iterations", "40", "--sample-seconds", "0.1", "--quiet"]  # fmt: skip


def test_phases_of_real_runs_explain_their_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker slowed down tenfold differs by far more than a busy machine adds."""
    for name, slow in (("plain", []), ("slowed", ["--slow", "0=10"])):
        assert main(["train", *SMALL, *slow, "--out", str(tmp_path), "--name", name]) == 0
    page, collection = write_report(tmp_path)
    by_id = {cell.runs[0].id: cell for cell in collection.cells}
    found = explain(by_id["plain"], by_id["slowed"])
    assert found is not None
    assert found.seconds > 0
    assert found.explained == pytest.approx(found.seconds, rel=0.05)
    assert "slow 0=10" in page.read_text()


def test_cells_whose_turn_has_not_come_are_named_together(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    (folder.path / "cells").rename(tmp_path / "elsewhere")
    first, second = collect(folder.path).chapters
    verdict = judge(first.cells)
    assert verdict.headline == "Nothing was run yet."
    assert [(point.subject, point.text) for point in verdict.points] == [
        ("Not run yet", "rate 0.01; rate 0.02")
    ]
    told = [(point.subject, point.text) for point in judge(second.cells).points]
    assert ("Not finished", "rate 0.03: skipped: needs a GPU") in told
