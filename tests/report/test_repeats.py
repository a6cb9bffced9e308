"""Cells with several repeats: tables are about all of them, and each repeat can be looked up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.accuracy import common_accuracy, summarize_accuracy
from paceline.analysis.collection import collect
from paceline.analysis.communication import all_reduce_bandwidth
from paceline.analysis.run_group import RunGroup
from paceline.report.build import to_document, write_report
from paceline.report.document import Details, Table, Text
from paceline.report.markdown import to_markdown
from tests.support.marks import SVG, figure, result_of, section
from tests.support.records import FakeRun, write_repeats, write_run
from tests.support.study_page import flat


def write_accuracies(root: Path, *accuracies: float) -> None:
    """Repeats that end with these accuracies, after half of them at half of the run."""
    for seed, accuracy in enumerate(accuracies):
        write_run(root, FakeRun(f"a-{seed}", {"seed": seed}, accuracy=accuracy))


def rows_of(groups: list[RunGroup], name: str, heading: str) -> list[dict[str, str]]:
    """Of the first table of a section that has such a column."""
    tables = [one for one in flat(section(groups, name).blocks) if isinstance(one, Table)]
    table = next(one for one in tables if any(heading in column for column in one.columns))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_common_accuracy_is_one_that_every_repeat_reached(tmp_path: Path) -> None:
    write_accuracies(tmp_path, 0.30, 0.20, 0.28)
    groups = collect(tmp_path).groups
    assert common_accuracy(summarize_accuracy(groups)) == 0.20
    # An epoch has 50 iterations: 0.20 is reached after 100, 100 and 100 of them.
    (row,) = rows_of(groups, "accuracy", "epochs to")
    assert row["epochs to 0.20"] == "2"


def test_accuracies_over_several_views_are_named(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("one", {"lr": 0.1}))
    write_run(tmp_path, FakeRun("six", {"lr": 0.2, "eval_views": 6}))
    groups = collect(tmp_path).groups
    (label,) = [group.label for group in groups if group.settings.get("eval_views") == 6]
    texts = [block.text for block in section(groups, "accuracy").blocks if isinstance(block, Text)]
    expected = f"Predictions of {label} are averaged over 6 views of each test image."
    assert texts[-1].endswith(expected)


def test_a_repeat_without_such_an_epoch_is_counted_out_loud(tmp_path: Path) -> None:
    write_accuracies(tmp_path, 0.30, 0.20, 0.28)
    # Of this one only the accuracy at the end is known.
    result = result_of(tmp_path / "a-1")
    result["history"] = []
    (tmp_path / "a-1" / "result.json").write_text(json.dumps(result))
    (row,) = rows_of(collect(tmp_path).groups, "accuracy", "epochs to")
    assert row["epochs to 0.20"] == "2 (2 of 3 repeats)"


def test_the_epoch_at_which_a_loss_converged_is_of_all_repeats(tmp_path: Path) -> None:
    """Of the last three of ten evaluations in one run, and of the last seven in another."""
    write_accuracies(tmp_path, 0.9, 0.9)
    for number, begin in ((0, 8), (1, 4)):
        path = tmp_path / f"a-{number}" / "result.json"
        result = json.loads(path.read_text())
        result["history"] = [
            {"iteration": 10 * epoch, "epoch": epoch, "seconds": 1.0 * epoch,
             "test_loss": 0.5 if epoch >= begin else 1.0, "test_accuracy": 0.9}
            for epoch in range(1, 11)
        ]  # fmt: skip
        path.write_text(json.dumps(result))
    (row,) = rows_of(collect(tmp_path).groups, "accuracy", "converged")
    assert row["converged after epoch"] == "6 (4 to 8)"


def test_the_workers_of_a_cell_are_means_over_its_repeats(tmp_path: Path) -> None:
    run = FakeRun("a", {}, [{"forward": 0.010, "exchange": 0.002}, {"forward": 0.012}])
    write_repeats(tmp_path, run, (1.0, 2.0, 3.0))
    groups = collect(tmp_path).groups
    first, second = rows_of(groups, "ranks", "training time")
    assert (first["time per iteration"], second["time per iteration"]) == ("24.00 ms", "24.00 ms")
    assert (first["compute"], second["compute"]) == ("20.00 ms", "24.00 ms")
    assert (first["communication"], second["communication"]) == ("4.00 ms", "0 us")
    # 100 iterations, of which the first takes double.
    assert first["training time"] == "2.42 s"
    svg = figure(section(groups, "phases"), "phases-workers")
    parts = [one.attrib for one in svg.iter(f"{SVG}rect") if "data-value" in one.attrib]
    forward = [float(one["data-value"]) for one in parts if one["data-kind"] == "forward"]
    assert forward == pytest.approx([0.020, 0.024])


def test_the_balance_of_a_cell_is_that_of_each_repeat(tmp_path: Path) -> None:
    """Another worker computes twice as long each time: 75% balance, though the means are equal."""
    for seed in (0, 1):
        phases = [{"forward": 0.010}, {"forward": 0.020}][:: 1 if seed else -1]
        write_run(tmp_path, FakeRun(f"a-{seed}", {"seed": seed}, phases))
    (row,) = rows_of(collect(tmp_path).groups, "ranks", "balance")
    assert row["compute balance"] == "75.0%"


def repeats_table(document: Any) -> Table:
    blocks = [block for part in document.chapters[0].sections for block in part.blocks]
    (fold,) = [one for one in blocks if isinstance(one, Details) and one.title == "Each repeat"]
    (table,) = [one for one in fold.blocks if isinstance(one, Table)]
    return table


def test_each_repeat_has_a_row_on_the_page_and_in_markdown(tmp_path: Path) -> None:
    for seed, (factor, accuracy) in enumerate(((1.0, 0.3), (2.0, 0.2))):
        spent = {"forward": 0.010 * factor}
        write_run(tmp_path, FakeRun(f"a-{seed}", {"seed": seed}, [spent], accuracy=accuracy))
    failed = FakeRun("a-2", {"seed": 2}, [{"forward": 0.01}], status="failed", cause="no room")
    write_run(tmp_path, failed)
    document = to_document(collect(tmp_path))
    table = repeats_table(document)
    shown = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["repeat"], row["seed"], row["run"]) for row in shown] == [
        ("1", "0", "a-0"), ("2", "1", "a-1"), ("3", "2", "a-2"),
    ]  # fmt: skip
    assert [row["status"] for row in shown] == ["finished", "finished", "failed"]
    assert [row["time per iteration"] for row in shown[:2]] == ["10.00 ms", "20.00 ms"]
    assert [row["test accuracy"] for row in shown] == ["0.3000", "0.2000", "-"]
    text = to_markdown(document)
    assert "**Each repeat**" in text
    assert "| a-1 |" in text[text.index("**Each repeat**") :]
    page = write_report(tmp_path).page
    assert "<details>\n<summary>Each repeat</summary>" in page.read_text()


def test_single_runs_have_no_table_of_repeats(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a"))
    assert "Each repeat" not in to_markdown(to_document(collect(tmp_path)))


def test_traffic_and_bandwidth_are_means_over_the_repeats(tmp_path: Path) -> None:
    """A run of each of two seeds; the second exchanges for twice as long, and sends as much."""
    run = FakeRun("a", {"strategy": "ring"}, [{"forward": 0.01, "exchange": 0.002}] * 2)
    run.gradient_bytes = 1_000_000
    write_repeats(tmp_path, run, (1.0, 2.0))
    groups = collect(tmp_path).groups
    (row,) = rows_of(groups, "traffic", "in flight")
    assert row["bytes per iteration"] == "2.0 MB"
    # 2 ms and 4 ms for each of 100 iterations, of which the first takes double.
    assert row["in flight"] == "303.00 ms"
    rate = all_reduce_bandwidth(groups[0])
    assert rate is not None
    assert rate.bytes == pytest.approx(1_000_000)
    assert rate.seconds == pytest.approx(0.00303)


@pytest.mark.parametrize(
    ("hidden", "message"),
    # 4 ms overlapped beside 6 ms of exposed communication.
    [(0.004, ("4.00 ms", "40.0%")), (0.0, ("0 us", "0.0%")), (None, ("not measured",) * 2)],
)
def test_overlapped_communication_is_a_figure_or_not_measured(
    hidden: float | None, message: tuple[str, str], tmp_path: Path
) -> None:
    run = FakeRun("a", {"strategy": "ddp"}, [{"forward": 0.01, "exchange": 0.006}] * 2)
    run.hidden = hidden
    write_run(tmp_path, run)
    write_run(tmp_path, FakeRun("b", {}, [{"forward": 0.02}]))
    groups = collect(tmp_path).groups
    first, alone = rows_of(groups, "phases", "overlapped communication")
    assert (first["overlapped communication"], first["overlapped share"]) == message
    assert alone["overlapped communication"] == "none"


@pytest.mark.parametrize(("hidden", "is_explained"), [(0.0, True), (0.004, False)])
def test_no_overlap_of_a_single_bucket_is_explained(
    hidden: float, is_explained: bool, tmp_path: Path
) -> None:
    run = FakeRun("a", {"strategy": "ddp"}, [{"forward": 0.01, "exchange": 0.006}] * 2)
    run.hidden, run.gradient_bytes = hidden, 1000
    write_run(tmp_path, run)
    blocks = section(collect(tmp_path).groups, "phases").blocks
    notes = [block.text for block in blocks if isinstance(block, Text)]
    assert any("fit into one bucket" in text for text in notes) == is_explained


def test_records_without_overlapped_communication_say_not_measured(tmp_path: Path) -> None:
    run = FakeRun("a", {"strategy": "ddp"}, [{"forward": 0.01, "exchange": 0.006}] * 2, is_old=True)
    path = write_run(tmp_path, run)
    result = result_of(path)
    for worker in result["workers"]:
        del worker["hidden_exchange_seconds"]
    (path / "result.json").write_text(json.dumps(result))
    (row,) = rows_of(collect(path).groups, "phases", "overlapped communication")
    assert row["overlapped communication"] == "not measured"


def test_means_of_repeats_have_their_confidence_interval(tmp_path: Path) -> None:
    write_accuracies(tmp_path, 0.30, 0.20, 0.28)
    groups = collect(tmp_path).groups
    (row,) = rows_of(groups, "overview", "test accuracy")
    # 4.303 standard errors of the mean, which is 0.0306.
    assert row["test accuracy"] == "0.2600 ± 0.1314 (0.2000 to 0.3000)"
    assert "±" in next(
        block.text for block in section(groups, "overview").blocks
        if isinstance(block, Text) and "confidence interval" in block.text
    )  # fmt: skip


def test_a_single_run_has_no_confidence_interval(tmp_path: Path) -> None:
    write_accuracies(tmp_path, 0.30)
    (row,) = rows_of(collect(tmp_path).groups, "overview", "test accuracy")
    assert row["test accuracy"] == "0.3000"
