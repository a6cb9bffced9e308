"""Differences of accuracy that a test set of its size or the spread of repeats could make."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from paceline.analysis.accuracy import (
    AccuracyDifference,
    compare_accuracy,
    compare_training_lengths,
    find_chance_accuracy,
)
from paceline.analysis.collection import collect
from paceline.analysis.comparison import read_comparison, significance
from paceline.analysis.run import open_run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.statistics import binomial_p
from paceline.analysis.verdict import make_verdict
from paceline.report.build import to_document
from paceline.report.document import Table, Text
from paceline.report.wording.differences import accuracy_note
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from tests.support.records import FakeRun, write_repeats, write_run


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
        ([0.90], [0.83], 100, AccuracyDifference(True, True, test_samples=100)),
        ([0.90], [0.80], 100, AccuracyDifference(False, True)),
        ([0.90], [0.90], 10_000, AccuracyDifference(True, True, True)),
        ([0.90], [0.83], 10_000, AccuracyDifference(False, True)),
        ([0.90, 0.91, 0.89], [0.80, 0.81, 0.79], 10_000, AccuracyDifference(False)),
        # Equal repeats: the test set they share still has a deviation of 0.042.
        ([0.90, 0.90], [0.9028, 0.9028], 100, AccuracyDifference(True)),
        ([0.90] * 3, [0.80] * 3, 100, AccuracyDifference(True)),
        ([0.90] * 3, [0.80] * 3, 10_000, AccuracyDifference(False)),
        ([1.00] * 3, [0.99] * 3, 100, AccuracyDifference(True)),
        ([0.90, 0.80, 0.70], [0.80, 0.82, 0.78], 100, AccuracyDifference(True)),
    ],
)
def test_chance_is_told_from_a_difference(
    tmp_path: Path, one: list[float], other: list[float], samples: int, expected: AccuracyDifference
) -> None:
    groups = [cell_of(tmp_path, "a", one, samples), cell_of(tmp_path, "b", other, samples)]
    assert compare_accuracy(*groups) == compare_accuracy(*reversed(groups)) == expected


@pytest.mark.parametrize(
    ("difference", "note"),
    [(AccuracyDifference(True, True, test_samples=100), "within the noise of 100 test samples"),
     (AccuracyDifference(False, True), "in a single run"),
     (AccuracyDifference(True, True, True), "the same"),
     (AccuracyDifference(True), "within noise"), (AccuracyDifference(False), "")],
)  # fmt: skip
def test_a_difference_in_accuracy_is_noted_with_its_uncertainty(
    difference: AccuracyDifference, note: str
) -> None:
    assert accuracy_note(difference) == note


@pytest.mark.parametrize(("samples", "is_significant"), [(None, True), (100, False)])
def test_repeats_of_equal_accuracy_are_as_uncertain_as_their_test_set(
    tmp_path: Path, samples: int | None, is_significant: bool
) -> None:
    """The digits have 10,000 test samples by default."""
    for name, accuracy in (("a", 0.9), ("b", 0.8)):
        settings = {} if samples is None else {"test_samples": samples}
        run = FakeRun(name, {"lr": accuracy, **settings}, accuracy=accuracy)
        write_repeats(tmp_path / name, run, (1.0, 1.0, 1.0))
    found = significance(read_comparison([str(tmp_path / "a"), str(tmp_path / "b")]).groups)
    (gap,) = [one.difference for one in found if one.name == "test accuracy"]
    assert gap.is_significant == is_significant


def test_accuracies_of_identical_models_are_rarely_called_different(tmp_path: Path) -> None:
    """Each repeat counts the successes of equally good models over the same 200 samples."""
    rng = random.Random(1)
    run = open_run(write_run(tmp_path, FakeRun("a", {"test_samples": 200})))
    trials, false = 1000, 0
    for _ in range(trials):
        groups = []
        for label in ("a", "b"):
            # All repeats agree on most samples: their spread is far below that of the test set.
            count = sum(rng.random() < 0.9 for _ in range(200))
            groups.append(RunGroup(label, [run]))
            drawn = [(count + rng.choice((-1, 0, 0, 1))) / 200 for _ in range(3)]
            vars(groups[-1])["finals"] = {"test_accuracy": drawn}.__getitem__
        false += not compare_accuracy(*groups).is_chance
    assert false / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


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


def test_a_binomial_tail_is_the_sum_of_its_terms() -> None:
    terms = (math.comb(20, count) * 0.1**count * 0.9 ** (20 - count) for count in range(5, 21))
    assert binomial_p(5, 20, 0.1) == pytest.approx(math.fsum(terms))
    assert binomial_p(0, 20, 0.1) == 1.0
    assert binomial_p(20, 20, 0.1) == pytest.approx(0.1**20)


@pytest.mark.parametrize(
    ("accuracies", "samples", "is_chance"),
    [
        # Guessing gets 4 or more of 20 right in 13% of cases, 5 or more in 4%.
        ([0.20], 20, True),
        ([0.25], 20, False),
        ([0.11], 1000, True),
        ([0.13], 1000, False),
        ([0.05], 1000, True),
        # Repeats share the test set, so they do not make it larger.
        ([0.11] * 5, 1000, True),
    ],
)
def test_an_accuracy_that_guessing_explains_is_at_chance(
    tmp_path: Path, accuracies: list[float], samples: int, is_chance: bool
) -> None:
    found = find_chance_accuracy([cell_of(tmp_path, "a", accuracies, samples)])
    assert [one.label for one in found] == ["a"] * is_chance


def test_more_configurations_need_a_clearer_accuracy(tmp_path: Path) -> None:
    groups = [cell_of(tmp_path, name, [0.25], 20) for name in "abcdef"]
    assert not find_chance_accuracy(groups[:1])
    assert len(find_chance_accuracy(groups)) == 6


def test_chance_is_the_share_of_the_most_frequent_class(tmp_path: Path) -> None:
    # A model that predicts 1 for every street number.
    runs = [
        open_run(write_run(tmp_path, FakeRun(data, {"data": data}, accuracy=0.1959)))
        for data in ("svhn", "cifar10")
    ]
    groups = [RunGroup(run.id, [run]) for run in runs]
    assert [one.label for one in find_chance_accuracy(groups)] == ["svhn"]


def test_own_data_have_an_unknown_number_of_classes(tmp_path: Path) -> None:
    settings = {"data": "mine:set", "test_samples": 20}
    run = open_run(write_run(tmp_path, FakeRun("own", settings, accuracy=0.1)))
    assert find_chance_accuracy([RunGroup("own", [run])]) == []


def test_an_accuracy_at_chance_is_in_the_headline(tmp_path: Path) -> None:
    groups = [cell_of(tmp_path, "a", [0.11], 100), cell_of(tmp_path, "b", [0.9], 100)]
    text = "not distinguishable from chance (0.10) with a (0.1100)"
    assert text in headline(make_verdict(groups))
    assert "chance" not in headline(make_verdict(groups[1:]))


def test_runs_of_different_length_are_a_finding(tmp_path: Path) -> None:
    runs = [open_run(write_run(tmp_path, FakeRun(f"{number}", iterations=count)))
            for number, count in enumerate((100, 100, 200))]  # fmt: skip
    groups = [RunGroup(f"{index}", [run]) for index, run in enumerate(runs)]
    assert compare_training_lengths(groups[:2]) is None
    lengths = compare_training_lengths(groups)
    assert lengths is not None
    assert (lengths.shortest.label, lengths.longest.label) == ("0", "2")
    (finding,) = (one for one in findings(make_verdict(groups)) if one.subject == "Training length")
    assert "0 was trained on 3,200 samples, 2 on 6,400" in finding.text


def test_runs_to_a_target_may_have_different_lengths(tmp_path: Path) -> None:
    settings = {"target_accuracy": 0.5}
    runs = [open_run(write_run(tmp_path, FakeRun(f"{count}", settings, iterations=count)))
            for count in (100, 200)]  # fmt: skip
    assert compare_training_lengths([RunGroup("a", [run]) for run in runs]) is None
