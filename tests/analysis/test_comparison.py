"""`paceline compare`: rows that say something, 80 columns, and what is significant."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.comparison import read_comparison, significance
from paceline.cli import main
from paceline.report.comparison import result_rows, setting_rows
from paceline.report.wording.differences import format_difference
from tests.support.records import FakeRun, write_repeats, write_run

LONG = "a-run-with-a-name-that-is-so-long-that-no-table-could-hold-it-beside-any-others-at-all"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spent = {"forward": 0.01, "exchange": 0.01}
    write_run(tmp_path, FakeRun(f"{LONG}-1", {"lr": 0.01}, [spent] * 2, gradient_bytes=1_000_000))
    write_run(tmp_path, FakeRun(f"{LONG}-2", {"lr": 0.02}, [spent] * 2, gradient_bytes=500_000))
    return tmp_path


def test_the_table_fits_and_no_row_comes_twice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, sorted(folder.iterdir()))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [re.split(r"  +", line)[0] for line in lines if re.search(r"\S  +\S", line)]
    assert len(names) == len(set(names))
    assert any(line.startswith("traffic sent") and "200.0 MB" in line for line in lines)
    assert any(line.startswith("lr ") and line.split()[1:] == ["0.01", "0.02"] for line in lines)


def test_one_configuration_is_nothing_to_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(min(folder.iterdir()))
    assert main(["compare", run]) == 2
    message = (
        "holds one configuration: give two or more runs, folders of runs or studies to compare"
    )
    assert capsys.readouterr().err == f"paceline: error: {run} {message}\n"
    assert main(["compare", str(folder)]) == 0


def test_a_run_is_not_compared_with_itself(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is given twice, as a copy, or as one of a folder's."""
    first, second = map(str, sorted(folder.iterdir()))
    copied = str(shutil.copytree(first, folder.parent / "copied"))
    for paths, what in (
        ([first, second, first], "run was"),
        ([first, copied], "run was"),
        ([str(folder), first], "runs were"),
    ):
        assert main(["compare", *paths]) == 2
        message = f"the same {what} given twice: {paths[0]} and {paths[-1]}"
        assert capsys.readouterr().err == f"paceline: error: {message}\n"


def test_only_what_differs_in_the_settings_is_told(folder: Path) -> None:
    groups = read_comparison([str(path) for path in sorted(folder.iterdir())]).groups
    assert [row.name for row in setting_rows(groups)] == ["lr"]
    results = {row.name: row.cells for row in result_rows(groups)}
    assert results["iteration, mean"] == ["20.00 ms", "20.00 ms"]
    assert "time to target" not in results, "no run has any"


def test_seeds_that_differ_are_shown(tmp_path: Path) -> None:
    paths = [str(write_run(tmp_path, FakeRun(f"s{seed}", {"seed": seed}))) for seed in (0, 1)]
    rows = {row.name: row.cells for row in setting_rows(read_comparison(paths).groups)}
    assert rows["seed"] == ["0", "1"]
    assert "seed" not in {row.name for row in setting_rows(read_comparison(paths[:1]).groups)}


def test_a_difference_beyond_the_repeats_is_significant_and_another_is_not(tmp_path: Path) -> None:
    for name, factors, accuracy in (("a", (1.0, 1.01, 1.02), 0.9), ("b", (1.5, 1.51, 1.52), 0.9)):
        run = FakeRun(name, {"lr": 0.01 if name == "a" else 0.02}, accuracy=accuracy)
        write_repeats(tmp_path / name, run, factors)
    found = significance(read_comparison([str(tmp_path / "a"), str(tmp_path / "b")]).groups)
    by_name = {one.name: one for one in found}
    pace = by_name["time per iteration"]
    # 20.2 ms against 30.2 ms.
    assert pace.difference.share == pytest.approx(-10 / 30.2)
    assert format_difference(pace.difference).startswith("-33.1% (corrected interval ")
    assert format_difference(pace.difference).endswith("; significant)")
    assert format_difference(by_name["test accuracy"].difference).endswith("within noise)")


def test_pace_is_of_as_many_samples_where_batches_differ_and_of_one_model_only(
    tmp_path: Path,
) -> None:
    groups: list[tuple[str, dict[str, Any], float]] = [
        ("a", {"batch_size": 32}, 0.02),
        ("b", {"batch_size": 128}, 0.04),
        ("c", {"model": "mlp"}, 0.01),
    ]
    for name, settings, seconds in groups:
        run = FakeRun(name, settings, [{"forward": seconds}])
        run.more = {"samples": settings.get("batch_size", 32) * run.iterations}
        write_run(tmp_path, run)
    paths = [str(tmp_path / name) for name in ("a", "b", "c")]
    found = significance(read_comparison(paths).groups)
    (pace,) = [one for one in found if "time per" in one.name]
    assert (pace.name, pace.other) == ("time per 1,000 samples", "b")
    # 625 ms against 312.5 ms.
    assert pace.difference.share == pytest.approx(1.0)
    assert format_difference(pace.difference).endswith(
        "over iterations; single run, significance unknown)"
    )
    assert [one.name for one in found if one.other == "c"] == ["test loss", "test accuracy"]


@pytest.mark.parametrize(
    ("batch", "samples", "name"),
    # The last batch of an epoch is smaller, so that the mean is below the batch.
    [(64, 320, "time per 1,000 samples"), (32, 150, "time per iteration")],
)
def test_the_pace_of_short_runs_is_told_in_the_terminal_by_what_their_batches_share(
    tmp_path: Path, batch: int, samples: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = FakeRun("a", {"batch_size": 32}, iterations=5, more={"samples": 160})
    other = FakeRun("b", {"batch_size": batch}, iterations=5, more={"samples": samples})
    paths = [str(write_run(tmp_path, run)) for run in (own, other)]
    assert main(["compare", *paths]) == 0
    assert f"A against B, {name}: " in capsys.readouterr().out


def test_repeats_of_a_folder_are_one_cell_and_runs_given_one_by_one_are_not(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a"), (1.0, 1.1))
    assert len(read_comparison([str(tmp_path)]).groups) == 1
    assert len(read_comparison([str(tmp_path / "a-0"), str(tmp_path / "a-1")]).groups) == 2


def test_the_terminal_prints_the_first_of_the_differences_that_the_page_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve groups: 11 others with four figures each are tested together."""
    for index in range(12):
        run = FakeRun(f"r{index:02}", {"lr": 0.01 * (index + 1)})
        write_repeats(tmp_path / run.name, run, (1.0 + index / 50, 1.01 + index / 50))
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    found = significance(read_comparison(paths).groups)
    assert {one.difference.comparisons for one in found} == {44}
    assert main(["compare", *paths]) == 0
    lines = " ".join(capsys.readouterr().out.split())
    message = [one for one in found if one.name == "time per iteration"]
    for letter, one in zip("BCDEFGH", message, strict=False):
        assert (
            f"A against {letter}, time per iteration: {format_difference(one.difference)}" in lines
        )
    assert "A against I" not in lines
    assert "4 more on the page that --html writes" in lines


def test_the_page_of_a_comparison_has_the_same_rows(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "compared.html"
    assert main(["compare", *map(str, sorted(folder.iterdir())), "--html", str(page)]) == 0
    text = page.read_text()
    assert "Settings that differ" in text
    assert "Significance" in text
    assert "200.0\u00a0MB" in text


def test_records_that_cannot_be_read_are_named_in_the_terminal_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_repeats(tmp_path / "runs", FakeRun("a"), (1.0, 1.1))
    (tmp_path / "runs" / "a-1" / "result.json").write_text("{")
    page = tmp_path / "compared.html"
    assert main(["compare", str(tmp_path / "runs")]) == 2
    assert "; skipped a-1: result.json is damaged" in capsys.readouterr().err
    write_run(tmp_path / "runs", FakeRun("b", {"lr": 0.5}))
    assert main(["compare", str(tmp_path / "runs"), "--html", str(page)]) == 0
    assert "skipped     a-1: result.json is damaged" in capsys.readouterr().out
    assert "<code>a-1</code>" in page.read_text()


def test_figures_that_are_compared_together_are_corrected_together(tmp_path: Path) -> None:
    """A t of 3.3 with four degrees has p = 0.03: significant alone, but not one of four figures."""
    for name, mean in (("a", 1.0), ("b", 1.08)):
        run = FakeRun(name, {"lr": 0.01 if name == "a" else 0.02})
        write_repeats(tmp_path / name, run, (mean - 0.03, mean, mean + 0.03))
    found = significance(read_comparison([str(tmp_path / "a"), str(tmp_path / "b")]).groups)
    (pace,) = [one for one in found if one.name == "time per iteration"]
    assert pace.difference.p_value == pytest.approx(0.031, abs=0.001)
    assert pace.difference.comparisons == 4
    assert format_difference(pace.difference).endswith("within noise)")


def test_models_with_other_options_are_other_models(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path, FakeRun(name, {"model_options": options}))
        for name, options in (("a", {}), ("b", {"width": "0.5"}))
    ]
    groups = read_comparison([str(path) for path in paths]).groups
    (row,) = setting_rows(groups)
    assert (row.name, row.cells) == ("model options", ["-", "width=0.5"])
    assert not any("time" in one.name for one in significance(groups))
