"""Tasks without an accuracy, and metrics of the user, in summaries, reports and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.accuracy import summarize_accuracy
from paceline.analysis.collection import collect
from paceline.analysis.comparison import match_studies, read_comparison, significance
from paceline.analysis.verdict import make_verdict
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.comparison import pair_rows, result_rows, write_comparison
from paceline.report.sections.learning import accuracy_answer
from paceline.report.summary import print_summary
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from tests.support.records import FakeRun, write_run

TASK = {"model": "mine:Regressor", "data": "mine:surface"}


def regression(name: str, seconds: float = 0.02, loss: float = 0.5, **more: Any) -> FakeRun:
    settings = {**TASK, **more.pop("settings", {})}
    phases = [{"forward": seconds}]
    return FakeRun(name, settings, phases, accuracy=None, loss=loss, **more)


def write(root: Path, *runs: FakeRun) -> Path:
    for run in runs:
        write_run(root, run)
    return root


def text_of(path: Path) -> str:
    return write_report(path).page.with_suffix(".md").read_text()


def test_nothing_mentions_the_accuracy_of_a_task_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [regression("a"), regression("b", 0.04, settings={"batch_size": 128}, iterations=50)]
    runs += [regression(f"c{seed}", 0.03, settings={"lr": 0.1, "seed": seed}) for seed in (0, 1)]
    folder = RunFolder(write(tmp_path, *runs) / "a")
    result = folder.read_result()
    assert result is not None
    print_summary(folder, result)
    summary = " ".join(capsys.readouterr().out.split())
    assert (
        "test set loss 0.5000; training loss 0.4000 (mean of the last steps, up to 100)" in summary
    )
    compared = read_comparison([str(tmp_path / name) for name in ("a", "b")])
    write_comparison(compared, tmp_path / "comparison.html")
    page = (tmp_path / "comparison.html").read_text()
    shown = [summary, text_of(tmp_path), text_of(folder.path), page[page.index("<body") :]]
    shown += [row.name for row in result_rows(compared.groups)]
    for text in shown:
        assert "accura" not in text.lower()
    assert ": losses and wall times are not comparable" in shown[1]


def test_report_of_a_task_without_accuracy_compares_test_losses(tmp_path: Path) -> None:
    page = text_of(
        write(tmp_path, regression("a"), regression("b", 0.04, 0.25, settings={"lr": 1}))
    )
    assert "## Test loss" in page
    assert "lr 1 has the lowest loss: test loss 0.2500; next is lr 0.01 with 0.5000," in page
    assert "| configuration | final loss | above the best | best loss | converged" in page
    assert "| lr 0.01 | 0.5000 | 0.2500 | 0.5000 |" in page
    assert "- **Test loss**: the fastest reaches 0.5000, lr 1 reaches 0.2500, in a single" in page
    assert "\n## Loss\n" in page


def test_loss_that_is_higher_by_up_to_one_percent_is_no_finding(tmp_path: Path) -> None:
    write(tmp_path, regression("a", loss=0.504), regression("b", 0.04, settings={"lr": 1}))
    subjects = [one.subject for one in findings(make_verdict(collect(tmp_path).groups))]
    assert "Test loss" not in subjects


def test_repeats_decide_whether_losses_differ(tmp_path: Path) -> None:
    for seed, noise in enumerate((-0.1, 0.0, 0.1)):
        write(tmp_path, regression(f"a{seed}", loss=0.5 + noise, settings={"seed": seed}))
        write(tmp_path, regression(f"b{seed}", loss=0.45 + noise, settings={"seed": seed, "lr": 1}))
    answer = accuracy_answer(summarize_accuracy(collect(tmp_path).groups))
    assert answer == (
        "No clear winner: test loss 0.4500 of lr 1 and 0.5000 of lr 0.01 are within noise."
    )


def test_headlines_have_the_test_loss(tmp_path: Path) -> None:
    alone = make_verdict(collect(write(tmp_path / "one", regression("a"))).groups)
    assert headline(alone).endswith("20.00 ms per iteration, test loss 0.5000.")
    workers = {"nproc_per_node": 2}
    approximate = {**workers, "strategy": "local_sgd"}
    both = [
        regression("a", settings={**workers, "strategy": "allreduce"}),
        regression("b", 0.01, 0.75, settings=approximate),
    ]
    for run in both:
        run.phases = [*run.phases] * 2
    verdict = make_verdict(collect(write(tmp_path / "two", *both)).groups)
    assert "test loss 0.7500 with local_sgd, 0.5000 with exact training" in headline(verdict)


def test_batch_sizes_are_compared_by_test_loss(tmp_path: Path) -> None:
    small, large = ({"batch_size": size} for size in (32, 64))
    page = text_of(
        write(tmp_path, regression("a", settings=small), regression("b", loss=0.6, settings=large))
    )
    assert "test loss 0.6000 instead of 0.5000" in page
    assert "![Test loss by batch size]" in page


def test_negative_losses_have_no_relative_difference_and_no_bars(tmp_path: Path) -> None:
    write(tmp_path, regression("a", loss=-1.5), regression("b", 0.04, -2.5, settings={"lr": 1}))
    groups = collect(tmp_path).groups
    assert "test loss" not in [one.name for one in significance(groups)]
    page = text_of(tmp_path)
    assert "lr 1 has the lowest loss: test loss -2.5000" in page
    assert "![Final test loss]" not in page
    assert "![Test loss against epoch]" in page


METRICS = {"f1": 0.8, "mean_error": 2.0}


def test_own_metrics_are_in_tables_and_curves(tmp_path: Path) -> None:
    runs = [
        FakeRun(f"a{seed}", {"seed": seed}, metrics={"accuracy": 0.9, **METRICS}) for seed in (0, 1)
    ]
    page = text_of(write(tmp_path, *runs))
    assert "| test accuracy | test loss | f1 | mean error | training loss |" in page
    assert "| validation accuracy | f1 | mean error | learning rate |" in page
    for figure in ("F1 against epoch", "Mean error against iteration"):
        assert f"![{figure}]" in page
    assert "## Loss and accuracy" in page
    only_metrics = text_of(write(tmp_path / "other", regression("b", metrics=METRICS)))
    assert "## Loss and metrics" in only_metrics


def test_repeats_may_have_different_metrics(tmp_path: Path) -> None:
    more = regression("b", settings={"metrics": "mine:f1"}, metrics=METRICS)
    (group,) = collect(write(tmp_path, regression("a"), more)).groups
    assert [run.final("f1") for run in group.runs] == [None, 0.8]


def test_own_metrics_are_compared(tmp_path: Path) -> None:
    for folder, factor in (("one", 1.0), ("two", 1.5)):
        for number, rate in enumerate((0.01, 0.1)):
            metrics = {"f1": 0.5 * factor, "perplexity": 4.0}
            settings = {"lr": rate}
            write(tmp_path / folder, regression(f"r{number}", settings=settings, metrics=metrics))
    compared = read_comparison([str(tmp_path / "one/r0"), str(tmp_path / "two/r0")])
    rows = {row.name: row.cells for row in result_rows(compared.groups)}
    assert rows["f1"] == ["0.5000", "0.7500"]
    assert rows["perplexity"] == ["4.0000", "4.0000"]
    assert [one.difference.share for one in significance(compared.groups) if one.name == "f1"] == [
        pytest.approx(-1 / 3)
    ]
    (pair,) = match_studies([collect(tmp_path / name) for name in ("one", "two")])
    table = next(one for one in pair.tables if one.title == "F1")
    assert [row.cells[1:4] for row in pair_rows(table)] == [("0.5000", "0.7500", "1.500")] * 2
    assert "Perplexity" not in [one.title for one in pair.tables], "it follows from the loss"
