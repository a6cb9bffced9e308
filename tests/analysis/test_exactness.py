"""Strategies that change the result are ranked separately from exact ones in every output."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.ranking import deviation
from paceline.analysis.verdict import make_verdict
from paceline.cli import main
from paceline.config import RunSettings, from_mapping
from paceline.report.document import BulletList, Text
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from tests.support.marks import section
from tests.support.records import FakeRun, write_run


@pytest.mark.parametrize(
    ("settings", "is_exact"),
    [
        ({"strategy": "allreduce"}, True),
        ({"strategy": "overlap", "options": {"codec": "none"}}, True),
        ({"strategy": "overlap", "options": {"codec": "fp16"}}, False),
        ({"strategy": "ring", "options": {"codec": "my.module:Codec"}}, False),
        ({"strategy": "local_sgd"}, False),
        ({"strategy": "local_sgd", "options": {"every": "4"}}, False),
        ({"strategy": "local_sgd", "options": {"every": "1"}, "optimizer": "sgd"}, True),
        ({"strategy": "local_sgd", "options": {"every": "1"}, "optimizer": "adam"}, False),
        ({"strategy": "local_sgd", "nproc_per_node": 1}, True),
        ({"strategy": "easgd"}, False),
        ({"strategy": "parameter_server"}, True),
        ({"strategy": "parameter_server", "options": {"mode": "sync"}}, True),
        ({"strategy": "parameter_server", "options": {"mode": "async"}}, False),
        ({"strategy": "parameter_server", "options": {"mode": "bounded"}}, False),
        ({"strategy": "my.module:Mine"}, False),
    ],
)
def test_what_is_exact_follows_from_the_settings(settings: dict[str, Any], is_exact: bool) -> None:
    config = from_mapping({"nproc_per_node": 2, **settings})
    assert (deviation(RunSettings.of(config)) is None) == is_exact


def write_three(root: Path) -> None:
    """Local SGD has the shortest steps and the lowest accuracy."""
    for strategy, seconds, accuracy in (
        ("local_sgd", 0.010, 0.80),
        ("overlap", 0.020, 0.90),
        ("allreduce", 0.030, 0.90),
    ):
        phases = [{"forward": seconds}] * 2
        write_run(root, FakeRun(strategy, {"strategy": strategy}, phases, accuracy=accuracy))


def test_the_headline_names_the_fastest_exact_and_the_fastest_approximate(tmp_path: Path) -> None:
    write_three(tmp_path)
    verdict = make_verdict(collect(tmp_path).groups)
    assert headline(verdict) == (
        "Fastest exact: overlap, 20.00 ms per iteration, 33.3% less time than allreduce (single"
        " run, significance unknown). Fastest approximate: local_sgd, 10.00 ms per iteration."
        " Approximate configurations can change the result: test accuracy 0.8000 with local_sgd,"
        " 0.9000 with exact training (overlap)."
    )
    assert ("Approximate", "local_sgd: workers train independently between averages.") in [
        (point.subject, point.text) for point in findings(verdict)
    ]


def test_terminal_markdown_and_page_rank_them_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_three(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    for text in (
        " ".join(capsys.readouterr().out.split()),
        (tmp_path / "report.md").read_text().replace("\\", ""),
        (tmp_path / "report.html").read_text().replace("\u00a0", " "),
    ):
        assert "Fastest exact: overlap" in text
        assert "Fastest approximate: local_sgd" in text
        assert "local_sgd was fastest" not in text


def test_a_comparison_ranks_them_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_three(tmp_path)
    assert main(["compare", str(tmp_path)]) == 0
    assert "Fastest exact: overlap" in " ".join(capsys.readouterr().out.split())


def test_time_to_the_same_accuracy_is_fair_to_all(tmp_path: Path) -> None:
    for strategy, seconds in (("local_sgd", 5.0), ("overlap", 9.0)):
        settings = {"strategy": strategy, "target_accuracy": 0.8}
        write_run(
            tmp_path,
            FakeRun(strategy, settings, [{"forward": 0.01}] * 2, seconds_to_target=seconds),
        )
    assert headline(make_verdict(collect(tmp_path).groups)).startswith(
        "local_sgd was fastest: 5.00 s"
    )


def test_only_approximate_cells_are_ranked_and_said_to_be_approximate(tmp_path: Path) -> None:
    for every, seconds in (("4", 0.02), ("16", 0.01)):
        settings = {"strategy": "local_sgd", "options": {"every": every}}
        write_run(tmp_path, FakeRun(f"e{every}", settings, [{"forward": seconds}] * 2))
    text = headline(make_verdict(collect(tmp_path).groups))
    assert text.startswith("every=16")
    assert "All of these are approximate: compare test accuracy as well as time." in text


def test_the_winners_of_a_grid_are_exact_and_approximate_ones_are_named(tmp_path: Path) -> None:
    write_three(tmp_path)
    groups = [
        dataclasses.replace(
            group, axes={"machines": "equal", "strategy": group.settings.strategy or ""}
        )
        for group in collect(tmp_path).groups
    ]
    blocks = section(groups, "winners").blocks
    answer = next(one.text for one in blocks if isinstance(one, Text) and one.kind == "answer")
    assert answer.startswith("overlap is the fastest exact choice in every case (equal).")
    assert answer.endswith("(can change the result): equal: local_sgd.")
    (items,) = [one for one in blocks if isinstance(one, BulletList)]
    assert "Fastest approximate: local_sgd" in items.items[0][1]
