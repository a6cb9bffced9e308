"""Studies of several parts: each part has its own verdict and sections."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.verdict import make_verdict
from paceline.cli import main
from paceline.report.build import TOGETHER, to_document, write_report
from paceline.report.html import to_html
from paceline.report.markdown import to_markdown
from paceline.report.sections import SECTIONS
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from paceline.study.folder import Cell, CellFailure, Part, Study, StudyFolder
from tests.support.records import FakeRun, write_run


def write_study(root: Path) -> StudyFolder:
    """Two parts; the first asks for its sections in an order of its own."""
    folder = StudyFolder(root / "study")
    cells = []
    for part, rates in (("one", (0.01, 0.02)), ("two", (0.01, 0.03))):
        for rate in rates:
            name = f"{part}.lr-{rate}"
            run = "one.lr-0.01" if rate == 0.01 else name
            trouble = CellFailure("skipped", "needs a GPU") if rate == 0.03 else None
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
    report = write_report(folder.path)
    page, collection = report.page, report.collection
    text = page.read_text()
    assert collection.title == "Two rates"
    assert "What does it ask?" in text
    assert "Others found 3." in text
    first = text[text.index('<article id="the-first-part"') : text.index('id="the-second-part"')]
    titles = re.findall(r"<h3>(.*?)</h3>", first)
    wanted = ["Overview", SECTIONS["phases"].title, "Loss and accuracy"]
    assert titles == ["Verdict", *wanted]
    last = text[text.index('<article id="all-parts"') :]
    assert re.findall(r"<h3>(.*?)</h3>", last) == [SECTIONS["configuration"].title]
    assert "No such section: no_such" in first
    assert "skipped: needs a GPU" in text, "a cell without a run is named with its cause"


def test_the_terminal_says_which_part_an_answer_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(write_study(tmp_path).path)]) == 0
    out = capsys.readouterr().out
    assert "The first part: " in out
    assert "The second part: rate 0.01: " in out


def test_a_run_of_two_cells_is_read_once(tmp_path: Path) -> None:
    collection = collect(write_study(tmp_path).path)
    assert [run.id for run in collection.runs] == ["one.lr-0.01", "one.lr-0.02"]


def test_cells_whose_turn_has_not_come_are_named_together(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    (folder.path / "cells").rename(tmp_path / "elsewhere")
    first, second = collect(folder.path).chapters
    verdict = make_verdict(first.groups)
    assert headline(verdict) == "Nothing was run yet."
    assert [(point.subject, point.text) for point in findings(verdict)] == [
        ("Not run yet", "rate 0.01; rate 0.02")
    ]
    message = [(point.subject, point.text) for point in findings(make_verdict(second.groups))]
    assert ("Not finished", "rate 0.03: skipped: needs a GPU") in message


def test_parts_with_titles_that_sound_alike_have_figures_of_their_own(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    study = folder.read()
    titles = [dataclasses.replace(part, title="Same; same") for part in study.parts]
    folder.write(dataclasses.replace(study, parts=tuple(titles)))
    document = to_document(collect(folder.path))
    assert [chapter.name for chapter in document.chapters] == ["same-same", "same-same-2", TOGETHER]
    names = [figure.name for figure in document.figures()]
    assert len(names) == len(set(names))


def test_a_study_opens_with_the_answers_of_its_first_parts(tmp_path: Path) -> None:
    document = to_document(collect(write_study(tmp_path).path))
    first, second = document.chapters[:2]
    assert document.headline.startswith(f"{first.title}: ")
    assert f"\n{second.title}: " in document.headline
    assert "configurations in" not in document.headline
    assert document.points == []


def test_a_study_opens_with_the_answers_that_it_names(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    named = dataclasses.replace(folder.read(), answer=(folder.read().parts[1].name,))
    folder.write(named)
    document = to_document(collect(folder.path))
    first, second = document.chapters[:2]
    assert document.headline.startswith(f"{second.title}: ")
    assert [title for title, _ in document.points] == [first.title]


def test_the_main_figures_follow_the_answer(tmp_path: Path) -> None:
    document = to_document(collect(write_study(tmp_path).path))
    assert document.main_figures
    page = to_html(document)
    names = re.findall(r'<figure class="figure" id="([^"]+)"', page)
    assert names[0] == document.main_figures[0].name
    assert len(set(names)) == len(names)


def test_what_stands_in_is_said_above_the_answer(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    folder.write(dataclasses.replace(folder.read(), stands_in="A narrow model stands in."))
    document = to_document(collect(folder.path))
    for text, verdict in (
        (to_html(document), "Verdict</h2>"),
        (to_markdown(document), "## Verdict"),
    ):
        assert text.index("A narrow model stands in.") < text.index(verdict)


def test_accuracies_at_chance_are_in_the_opening(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    write_run(tmp_path / "chance", FakeRun("one.lr-0.02", {"lr": 0.02}, accuracy=0.1))
    shutil.rmtree(folder.cells / "one.lr-0.02")
    (tmp_path / "chance" / "one.lr-0.02").rename(folder.cells / "one.lr-0.02")
    document = to_document(collect(folder.path))
    last = document.headline.split("\n")[-1]
    cause = "Test accuracy is not distinguishable from chance (0.10) with The first part: rate 0.02"
    assert last.startswith(cause)


def test_contention_is_in_the_opening_once(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    file = folder.cells / "one.lr-0.01" / "result.json"
    result = json.loads(file.read_text())
    result["nodes"][0] |= {"cpu_percent_mean": 60.0, "machine_cpu_percent_mean": 100.0}
    file.write_text(json.dumps(result))
    document = to_document(collect(folder.path))
    assert document.headline.count("rerun on a quiet machine") == 1
    assert document.headline.split("\n")[-1].startswith("Other processes used up to ")


def test_parts_with_the_same_answer_are_all_told(tmp_path: Path) -> None:
    folder = write_study(tmp_path)
    study = folder.read()
    cells = tuple(dataclasses.replace(cell, trouble=None) for cell in study.cells)
    folder.write(dataclasses.replace(study, cells=cells))
    (folder.path / "cells").rename(tmp_path / "elsewhere")
    document = to_document(collect(folder.path))
    first, second = document.chapters[:2]
    for chapter in (first, second):
        assert f"{chapter.title}: Nothing was run yet." in document.headline
