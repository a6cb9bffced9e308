"""Differences of accuracy that a test set of its size or the spread of repeats could make."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.report.build import to_document
from paceline.report.cells import RunGroup
from paceline.report.chance import AccuracyDifference, compare_accuracy
from paceline.report.collection import collect
from paceline.report.document import Table, Text
from paceline.report.run import open_run
from report.records import FakeRun, write_run


def cell_of(folder: Path, name: str, accuracies: list[float], test_samples: int) -> RunGroup:
    settings = {"test_samples": test_samples}
    runs = [
        open_run(write_run(folder, FakeRun(f"{name}{number}", settings, accuracy=accuracy)))
        for number, accuracy in enumerate(accuracies)
    ]
    return RunGroup(name, runs)


@pytest.mark.parametrize(
    ("one", "other", "samples", "expected"),
    [
        # One deviation of the difference is sqrt(2 x 0.9 x 0.1 / 100) = 0.042.
        ([0.90], [0.83], 100, AccuracyDifference(True, "within the noise of 100 test samples")),
        ([0.90], [0.80], 100, AccuracyDifference(False, "in one repeat")),
        ([0.90], [0.90], 10_000, AccuracyDifference(True, "the same")),
        ([0.90], [0.83], 10_000, AccuracyDifference(False, "in one repeat")),
        ([0.90, 0.91, 0.89], [0.80, 0.81, 0.79], 100, AccuracyDifference(False, "")),
        ([0.90, 0.80, 0.70], [0.80, 0.82, 0.78], 100, AccuracyDifference(True, "within noise")),
    ],
)
def test_chance_is_told_from_a_difference(
    tmp_path: Path, one: list[float], other: list[float], samples: int, expected: AccuracyDifference
) -> None:
    cells = [cell_of(tmp_path, "a", one, samples), cell_of(tmp_path, "b", other, samples)]
    assert compare_accuracy(*cells) == compare_accuracy(*reversed(cells)) == expected


def test_accuracies_of_different_data_are_not_held_against_each_other(tmp_path: Path) -> None:
    for name, data in (("a", "digits"), ("b", "cifar10")):
        write_run(tmp_path, FakeRun(name, {"data": data}, accuracy=0.9 if name == "a" else 0.5))
    (section,) = [
        section
        for section in to_document(collect(tmp_path)).chapters[0].sections
        if section.name == "accuracy"
    ]
    text, table = section.blocks[0], section.blocks[-2]
    assert text == Text("Not compared: accuracies are of different data.", "answer")
    assert isinstance(table, Table)
    assert "below the best" not in table.columns
