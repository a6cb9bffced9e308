"""The page and its twin: what is in them, and that nothing breaks them."""

from __future__ import annotations

import argparse
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.analysis.phases import explain
from paceline.analysis.run import open_run
from paceline.cli import main
from paceline.cli.config_flags import add_config_flags, given_flags
from paceline.config import RunSettings, from_mapping
from paceline.report.build import write_report
from paceline.report.sections.overview import command, where_to_type
from tests.support.records import FakeRun, write_repeats, write_run

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
    page = write_report(folder).page
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
    page = write_report(folder).page
    for file in (page, page.with_suffix(".md")):
        text = file.read_text()
        assert text.index("Verdict") < text.index("Overview")
    assert "What to try next" in page.read_text()


def test_every_figure_is_a_file_beside_the_markdown(folder: Path) -> None:
    page = write_report(folder).page
    named = re.findall(r"\]\((report-figures/[^)]+)\)", page.with_suffix(".md").read_text())
    files = {str(path.relative_to(folder)) for path in (folder / "report-figures").iterdir()}
    assert set(named) == files
    assert len(named) > 10
    assert all("prefers-color-scheme: dark" in (folder / name).read_text() for name in named)


def test_the_same_records_make_the_same_page(folder: Path) -> None:
    first = write_report(folder).page.read_bytes()
    assert write_report(folder).page.read_bytes() == first


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("<script>alert(1)<b>", {"model": "a.b:<img src=x>"}))
    write_run(tmp_path, FakeRun("two", {"model": "a.b:|_c_|"}, status="failed", cause="<i>&`x`"))
    page = write_report(tmp_path).page
    outline = Outline(page.read_text())
    assert outline.sources == []
    assert "<script>alert" not in page.read_text()
    markdown = re.sub(r"```.*?```", "", page.with_suffix(".md").read_text(), flags=re.S)
    assert re.findall(r"(?<!\\)<", markdown) == []


def test_runs_that_did_not_finish_are_shown_with_their_cause(folder: Path) -> None:
    write_run(folder, FakeRun("cut", {"lr": 0.3}, status="failed", cause="the cable was cut"))
    write_run(folder, FakeRun("going", {"lr": 0.4}, status="unfinished"))
    text = write_report(folder).page.read_text()
    assert "cut: failed.</b> the cable was cut" in text
    assert "going: unfinished.</b> no result.json" in text


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
        "schedule": "steps", "lr_steps": "1e-2:10,1e-3:10", "channels_last": "on",
    }  # fmt: skip
    run = open_run(write_run(tmp_path, FakeRun("a", settings, [{"forward": 0.1}] * 2)))
    config = run.settings.config
    assert config is not None
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    words = shlex.split(command(run.settings))
    assert words[:2] == ["paceline", "train"]
    again = from_mapping(given_flags(parser.parse_args(words[2:])))
    assert {**again.to_dict(), "out": config.out, "name": config.name} == config.to_dict()


def test_the_command_of_a_run_in_a_cluster_is_what_its_user_typed() -> None:
    settled = {"cluster": "nodes=2", "nnodes": 2, "master_addr": "10.77.0.1", "name": "a"}
    assert command(RunSettings.of(from_mapping(settled))) == "paceline train --cluster nodes=2"


def test_a_command_for_several_machines_says_where_to_type_it() -> None:
    by_hand = {"nnodes": 2, "master_addr": "one", "node_rank": 1}
    settings = RunSettings.of(from_mapping(by_hand))
    assert command(settings) == "paceline train --nnodes 2 --master-addr one"
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
    report = write_report(tmp_path)
    page, collection = report.page, report.collection
    by_id = {group.runs[0].id: group for group in collection.groups}
    found = explain(by_id["plain"], by_id["slowed"])
    assert found is not None
    assert found.seconds > 0
    assert found.explained == pytest.approx(found.seconds, rel=0.05)
    assert "slow 0=10" in page.read_text()
