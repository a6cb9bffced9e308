"""What a step costs: one row per configuration, in the page and in 80 columns of the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.comparison import read_comparison
from paceline.analysis.step_cost import StepCost, step_costs
from paceline.cli import main
from paceline.errors import RecordsError
from paceline.records import MEMORY_KEYS
from paceline.report.build import write_report
from paceline.report.comparison import result_rows
from paceline.report.sections.step_cost import step_cost_answer
from tests.support.records import FakeRun, write_run
from tests.support.study_page import page_of

PHASES = {"forward": 0.01, "backward": 0.02, "exchange": 0.015, "wait": 0.005}


def two_workers(root: Path, name: str, peak_bytes: tuple[int, int], **fields: object) -> Path:
    run = FakeRun(name, phases=[PHASES, PHASES], gradient_bytes=4_000_000)
    path = write_run(root, FakeRun(**{**vars(run), **fields}))
    file = path / "result.json"
    result = json.loads(file.read_text())
    # The initial weights are not part of a step.
    result["workers"][0]["traffic"]["parameters"]["bytes_sent"] = 10**9
    for worker, peak in zip(result["workers"], peak_bytes, strict=True):
        worker["memory"] = {**dict.fromkeys(MEMORY_KEYS, 1_000_000), "peak_bytes": peak}
    file.write_text(json.dumps(result))
    return path


def cost_of(path: Path) -> StepCost:
    (cost,) = step_costs(collect(path).groups)
    return cost


def test_step_has_its_time_bytes_and_memory_of_a_worker_and_the_loss(tmp_path: Path) -> None:
    cost = cost_of(two_workers(tmp_path, "two", (30_000_000, 50_000_000)))
    assert cost.seconds == pytest.approx(0.05)
    assert cost.compute_seconds == pytest.approx(0.03)
    assert cost.split is not None
    assert cost.split.seconds["exchange"] == pytest.approx(0.015)
    assert cost.sent_bytes == 4_000_000
    assert cost.memory["peak_bytes"] == 50_000_000
    assert cost.loss == 0.5


def test_records_of_an_earlier_version_have_the_mean_bytes_over_the_run(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, FakeRun("old", phases=[PHASES] * 2, gradient_bytes=4_000_000, is_old=True)
    )
    cost = cost_of(path)
    assert cost.sent_bytes == 4_000_000
    assert set(cost.memory.values()) == {None}


def test_page_has_the_table_and_the_memory_of_each_part_of_a_step(tmp_path: Path) -> None:
    page = write_report(two_workers(tmp_path, "two", (30_000_000, 50_000_000)).parent).page
    text = page.with_suffix(".md").read_text()
    assert "| step | 50.0 ms |\n| compute | 30.0 ms |\n| exposed comm. | 15.0 ms (30%) |" in text
    assert "| sent | 4.0 MB |\n| memory | 50.0 MB |\n| loss | 0.5000 |" in text
    assert "| setup | 1.0 MB |" in text
    assert "| peak | 50.0 MB |" in text


def test_answer_names_the_extremes(tmp_path: Path) -> None:
    two_workers(tmp_path, "small", (30_000_000, 30_000_000), settings={"strategy": "sharded"})
    slow = {**PHASES, "exchange": 0.065}
    two_workers(tmp_path, "large", (50_000_000, 50_000_000), phases=[slow, slow])
    assert step_cost_answer(step_costs(collect(tmp_path).groups)) == (
        "A step takes 50.0 ms with sharded to 100 ms with allreduce; exposed communication is 30%"
        " of it with sharded to 65% of it with allreduce; a worker needs 30.0 MB with sharded to"
        " 50.0 MB with allreduce."
    )


def test_answer_treats_models_separately(tmp_path: Path) -> None:
    for model in ("lenet", "mlp"):
        for strategy in ("sharded", "overlap"):
            settings = {"model": model, "strategy": strategy}
            two_workers(tmp_path, f"{model}-{strategy}", (10, 10), settings=settings)
    text = step_cost_answer(step_costs(collect(tmp_path).groups))
    assert "lenet on digits: A step takes" in text
    assert " mlp on digits: A step takes" in text


def test_report_of_a_study_prints_the_table_within_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = page_of("transformer-ways", tmp_path).folder
    assert main(["report", str(folder.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.startswith("configuration")]
    assert len(headings) == 4, "one table per part"
    assert headings[0].split() == [
        "configuration", "step", "compute", "exposed", "comm.", "sent", "memory", "loss",
    ]  # fmt: skip
    assert sum(line.startswith("sharded state ") for line in lines) == 4
    assert max(len(line) for line in lines if not line.startswith("report ")) <= 80


def test_comparison_has_the_memory_of_a_worker(tmp_path: Path) -> None:
    paths = [
        two_workers(tmp_path, "one", (30_000_000, 50_000_000)),
        write_run(tmp_path, FakeRun("old")),
    ]
    rows = {
        row.name: row.cells
        for row in result_rows(read_comparison([str(path) for path in paths]).groups)
    }
    assert rows["memory, worker"] == ["50.0 MB", "-"]


@pytest.mark.parametrize("memory", [[], {"peak_bytes": "much"}])
def test_damaged_memory_is_rejected(memory: object, tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("run"))
    file = path / "result.json"
    result = json.loads(file.read_text())
    result["workers"][0]["memory"] = memory
    file.write_text(json.dumps(result))
    with pytest.raises(RecordsError, match="memory"):
        collect(path)
