"""`paceline compare` of studies: one row for each pair of matching cells."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.comparison import StudyPair, read_comparison
from paceline.cli import main
from paceline.report.comparison import PairRow, differences, pair_rows, unmatched
from paceline.report.wording.study_pair import pair_headline, pair_notes
from paceline.study.folder import Cell, Part, Study, StudyFolder
from tests.support.records import FakeRun, write_run

STEADY = (0.99, 1.0, 1.01)
"""Three repeats, 1% apart."""


def write_study(
    path: Path,
    cells: Mapping[str, tuple[float, Sequence[float]]],
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Cells by strategy: seconds of an iteration, and for each repeat a factor of these."""
    folder = StudyFolder(path)
    rows = []
    for strategy, (seconds, factors) in cells.items():
        for repeat, factor in enumerate(factors, 1):
            name = f"{strategy}.r{repeat}"
            given = {"strategy": strategy, "seed": repeat, **(settings or {})}
            phases = [{"forward": seconds * factor}] * 2
            write_run(folder.cells, FakeRun(name, given, phases))
            rows.append(Cell(name, "all", strategy, f"with {strategy}", repeat,
                             {"strategy": strategy}, {"strategy": strategy}, name))  # fmt: skip
    part = Part("all", "Strategies", "", "", (), {"strategy": tuple(cells)})
    folder.write(Study("ways", "quick", "Ways", "", (), (part,), tuple(rows)))
    return path


@pytest.fixture
def studies(tmp_path: Path) -> list[str]:
    before = {"ring": (0.020, STEADY), "tree": (0.030, STEADY), "overlap": (0.010, (1.0,)),
              "gather_scatter": (0.050, STEADY)}  # fmt: skip
    after = {"ring": (0.010, STEADY), "tree": (0.0301, STEADY), "overlap": (0.020, (1.0,)),
             "allreduce": (0.040, STEADY)}  # fmt: skip
    return [str(write_study(tmp_path / "before" / "ways", before)),
            str(write_study(tmp_path / "after" / "ways", after))]  # fmt: skip


def pair_of(paths: Sequence[str]) -> StudyPair:
    (pair,) = read_comparison(paths).pairs
    return pair


def rows_of(pair: StudyPair) -> dict[str, dict[str, PairRow]]:
    """By table and configuration."""
    return {table.title: {row.name: row for row in pair_rows(table)} for table in pair.tables}


def test_cells_with_the_same_settings_make_a_row_with_both_values(studies: list[str]) -> None:
    pair = pair_of(studies)
    assert (pair.first, pair.other) == ("before/ways", "after/ways")
    step = pair.tables[0]
    assert step.title == "Step time"
    rows = rows_of(pair)["Step time"]
    assert list(rows) == ["with ring", "with tree", "with overlap"]
    ring = rows["with ring"]
    assert (ring.first, ring.other, ring.ratio) == ("20.00 ms", "10.00 ms", "0.500")
    assert ring.significance == "significant"
    # By hand: deviations 0.2 and 0.1 ms make a standard error of sqrt((0.2**2 + 0.1**2) / 3) =
    # 0.1291 ms; 2.94 degrees of freedom. Two rows each of step time, accuracy and loss are six
    # comparisons, so the level is 0.05 / 6 and t = 6.363: 10 -+ 0.8215 ms of 20.
    change = step.rows[0].change
    assert change is not None
    assert change.low == pytest.approx(-0.5 - 0.8215 / 20, abs=0.001)
    low, high = map(float, ring.interval.split(" to "))
    assert (low, high) == pytest.approx((0.459, 0.541), abs=0.001)
    assert rows["with tree"].significance == "within noise"
    assert rows["with tree"].ratio == "1.003"


def test_a_single_run_has_no_interval_and_no_significance(studies: list[str]) -> None:
    pair = pair_of(studies)
    rows = rows_of(pair)["Step time"]
    single = rows["with overlap"]
    assert (single.ratio, single.interval, single.significance) == ("2.000", "-", "single run")
    assert any("significance, is unknown" in text for text in pair_notes(pair))


def test_the_headline_counts_what_is_significant(studies: list[str]) -> None:
    text = pair_headline(pair_of(studies))
    assert text.startswith(
        "after/ways against before/ways, step time of 3 matching configurations: 1 faster,"
        " 1 within noise, 1 with a single run (significance unknown)."
    )
    # The third root of 0.5 * 1.00333 * 2.
    assert text.endswith("Geometric mean of the ratios: 1.001.")


def disturb(study: str, run: str) -> None:
    """Other processes use 70% of the machine during the run."""
    file = Path(study) / "cells" / run / "result.json"
    result = json.loads(file.read_text())
    result["nodes"][0] |= {"cpu_percent_mean": 60.0, "machine_cpu_percent_mean": 100.0}
    file.write_text(json.dumps(result))


def test_times_on_a_busy_machine_are_not_tested_and_the_headline_asks_for_a_rerun(
    studies: list[str],
) -> None:
    assert "Other processes" not in pair_headline(pair_of(studies))
    disturb(studies[1], "ring.r2")
    pair = pair_of(studies)
    tables = rows_of(pair)
    ring = tables["Step time"]["with ring"]
    assert (ring.ratio, ring.interval, ring.significance) == ("0.500", "-", "CPU contention")
    tree = tables["Step time"]["with tree"]
    assert tree.significance == "within noise"
    # Of step time, accuracy and loss of two cells each, one is not tested.
    change = pair.tables[0].rows[1].change
    assert change is not None
    assert change.comparisons == 5
    assert tables["Test accuracy"]["with ring"].significance == "within noise"
    text = pair_headline(pair)
    assert "1 within noise" in text
    assert "faster" not in text
    assert "1 with CPU contention (not tested)" in text
    assert text.endswith(
        "Other processes used up to 70.0% of the CPU meanwhile: rerun on a quiet machine"
        " before drawing conclusions."
    )
    assert any(note.startswith("CPU contention: ") for note in pair_notes(pair))


def test_cells_without_a_match_are_listed_once(
    studies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert unmatched(pair_of(studies)) == [
        ("Only in before/ways:", "with gather_scatter"),
        ("Only in after/ways:", "with allreduce"),
    ]
    assert main(["compare", *studies]) == 0
    out = capsys.readouterr().out
    assert out.count("with gather_scatter") == out.count("with allreduce") == 1


def test_the_terminal_has_a_line_for_each_cell_within_80_columns(
    studies: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *studies]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == ["A  before/ways", "B  after/ways"]
    (row, *_) = [line for line in lines if line.startswith("with ring")]
    assert row.split()[:7] == ["with", "ring", "20.00", "ms", "10.00", "ms", "0.500"]
    assert row.endswith("significant")
    assert not [line for line in lines if re.match(r"[C-Z]  ", line)], "no wall of letters"


def test_a_row_without_values_leaves_room_for_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeats that ended differently, beside the widest texts of every other column."""
    cells = {"gather_scatter": (0.020, (1.0, 1.0, 1.0)), "tree": (1000.0, (0.5, 1.0, 1.5))}
    paths = [write_study(tmp_path / name, cells) for name in ("a", "b")]
    for path, status in ((paths[0], "diverged"), (paths[1], "stopped")):
        for repeat, ended in ((1, "failed"), (2, "failed"), (3, status)):
            file = path / "cells" / f"gather_scatter.r{repeat}" / "result.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"status": ended}))
        disturb(str(path), "tree.r1")
    file = paths[0] / "cells" / "gather_scatter.r1" / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "finished"}))
    assert main(["compare", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(re.match("with tree .*CPU contention$", line) for line in lines)
    (row, *_) = [line for line in lines if "not finished" in line]
    assert row.startswith("with gather_scat"), "a folded name has at least 16 columns"


def test_the_page_and_markdown_have_the_same_rows(studies: list[str], tmp_path: Path) -> None:
    page, text = tmp_path / "out.html", tmp_path / "out.md"
    assert main(["compare", *studies, "--html", str(page), "--markdown", str(text)]) == 0
    assert "<td>with ring</td><td class=n>20.00\u00a0ms</td>" in page.read_text()
    written = text.read_text()
    assert "| with ring | 20.00 ms | 10.00 ms | 0.500 |" in written
    assert "## Configurations without a match" in written


def test_markdown_of_runs_side_by_side_brings_its_figures(tmp_path: Path) -> None:
    for name, rate in (("a", 0.01), ("b", 0.02)):
        write_run(tmp_path / "runs", FakeRun(name, {"lr": rate}))
    text = tmp_path / "pages" / "side by side.md"
    paths = [str(tmp_path / "runs" / name) for name in ("a", "b")]
    assert main(["compare", *paths, "--markdown", str(text)]) == 0
    links = re.findall(r"\]\((side-by-side-figures/[^)]+\.svg)\)", text.read_text())
    assert links
    for link in links:
        assert (text.parent / link).is_file()


def test_cells_with_the_same_name_match_and_what_differs_is_said_once(tmp_path: Path) -> None:
    cells = {"ring": (0.020, STEADY), "tree": (0.030, STEADY)}
    paths = [
        str(write_study(tmp_path / "a", cells, {"lr": 0.01})),
        str(write_study(tmp_path / "b", cells, {"lr": 0.02})),
    ]
    pair = pair_of(paths)
    assert [one.name for one in pair.matches] == ["with ring", "with tree"]
    assert differences(pair) == [("lr:", "0.01 in a, 0.02 in b")]


def test_cells_with_the_same_name_but_another_model_do_not_match(tmp_path: Path) -> None:
    cells = {"ring": (0.020, STEADY)}
    paths = [
        str(write_study(tmp_path / "a", cells, {"model": "lenet"})),
        str(write_study(tmp_path / "b", cells, {"model": "mlp"})),
    ]
    pair = pair_of(paths)
    assert pair.matches == []
    assert pair_headline(pair) == "b and a have no configurations with the same settings or names."


def test_folders_of_runs_match_by_settings_unless_each_holds_one_cell(tmp_path: Path) -> None:
    for folder, factor in (("a", 1.0), ("b", 2.0)):
        for name, rate in (("x", 0.01), ("y", 0.02)):
            run = FakeRun(f"{folder}{name}", {"lr": rate}, [{"forward": 0.01 * factor}])
            write_run(tmp_path / folder, run)
    pair = pair_of([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [row.ratio for row in pair_rows(pair.tables[0])] == ["2.000", "2.000"]
    write_run(tmp_path / "c", FakeRun("cx", {"lr": 0.01}))
    write_run(tmp_path / "d", FakeRun("dx", {"lr": 0.01}))
    assert read_comparison([str(tmp_path / "c"), str(tmp_path / "d")]).pairs == []


def test_batches_that_differ_are_compared_for_the_same_number_of_samples(tmp_path: Path) -> None:
    cells = {"ring": (0.020, STEADY)}
    paths = [
        str(write_study(tmp_path / "a", cells, {"batch_size": 64})),
        str(write_study(tmp_path / "b", cells, {"batch_size": 32})),
    ]
    # Both recorded 64 samples for each iteration of 20 ms.
    table = pair_of(paths).tables[0]
    assert table.title == "Time per 1,000 samples"
    assert pair_rows(table)[0].first == "312.50 ms"


def test_more_than_two_studies_are_each_compared_with_the_first(
    studies: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    third = str(write_study(tmp_path / "third" / "ways", {"ring": (0.040, STEADY)}))
    pairs = read_comparison([*studies, third]).pairs
    assert [(pair.first, pair.other) for pair in pairs] == [
        ("before/ways", "after/ways"),
        ("before/ways", "third/ways"),
    ]
    assert main(["compare", *studies, third]) == 0
    assert "C/A" in capsys.readouterr().out


def test_a_cell_without_a_finished_run_says_how_it_ended(tmp_path: Path) -> None:
    cells = {"ring": (0.020, STEADY), "tree": (0.030, (1.0,))}
    first, second = tmp_path / "a", tmp_path / "b"
    write_study(first, cells)
    write_study(second, cells)
    (second / "cells" / "tree.r1" / "result.json").unlink()
    (rows, *_) = rows_of(pair_of([str(first), str(second)])).values()
    assert (rows["with tree"].other, rows["with tree"].ratio) == ("unfinished", "-")
