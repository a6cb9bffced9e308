"""What to try next: nothing that was tried, cannot be done, or does not follow from the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.verdict import make_verdict
from paceline.report.wording.headline import headline
from paceline.report.wording.recommendations import next_steps
from tests.support.records import FakeRun, write_repeats, write_run

COMPUTE = {"forward": 0.010, "backward": 0.008}
NETWORK_BOUND = [{**COMPUTE, "exchange": 0.020}] * 2


def steps(folder: Path) -> str:
    return " ".join(next_steps(make_verdict(collect(folder).groups)))


def test_what_can_hide_is_as_long_as_the_backward_pass(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {}, NETWORK_BOUND))
    assert "40.0% of it can overlap with the backward pass" in steps(tmp_path)


@pytest.mark.parametrize(("strategy", "is_told"), [("ring", True), ("parameter_server", False)])
def test_a_codec_is_for_strategies_that_have_codecs(
    strategy: str, is_told: bool, tmp_path: Path
) -> None:
    settings = {"strategy": strategy, "nnodes": 2, "nproc_per_node": 1}
    write_run(tmp_path, FakeRun("a", settings, NETWORK_BOUND, nodes=2))
    assert ("codec=fp16" in steps(tmp_path)) == is_told


@pytest.mark.parametrize(("shares", "is_told"), [("", True), ("auto", False)])
def test_shares_by_speed_are_told_to_who_has_them_not_yet(
    shares: str, is_told: bool, tmp_path: Path
) -> None:
    phases = [{**COMPUTE, "wait": 0.022}, {"forward": 0.040}]
    write_run(tmp_path, FakeRun("a", {"shares": shares} if shares else {}, phases))
    assert ("--shares auto" in steps(tmp_path)) == is_told


@pytest.mark.parametrize(
    ("mode", "message"),
    [("sync", "Try --checkpoint-mode background"), ("background", "Checkpoint less often")],
)
def test_checkpoints_that_cost_much_have_a_remedy(mode: str, message: str, tmp_path: Path) -> None:
    settings = {"checkpoint_every": 10, "checkpoint_mode": mode}
    phases = [{"forward": 0.01, "checkpoint": 0.01}]
    write_run(tmp_path, FakeRun("a", settings, phases))
    assert message in steps(tmp_path)
    assert "checkpoints block training for" in steps(tmp_path)


@pytest.mark.parametrize(("cores", "is_told"), [(2, True), (8, False)])
def test_more_workers_than_cores_are_for_another_machine(
    cores: int, is_told: bool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"hardware": {"cpu": "a CPU", "cores": cores}}
    write_run(tmp_path, FakeRun("a", {"threads": 1}, [COMPUTE] * 2, more=more))
    assert "Try 4 workers" in steps(tmp_path)
    assert ("on more cores than the" in steps(tmp_path)) == is_told


def test_a_tie_that_another_repeat_would_end_is_worth_it(tmp_path: Path) -> None:
    """18 and 23.8 ms with a standard deviation of 1.4 ms each: two of each nearly do."""
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}, [{"forward": 0.001}]), (17.0, 19.0))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.001}]), (22.8, 24.8))
    assert headline(make_verdict(collect(tmp_path).groups)).startswith("No clear winner")
    assert "Run 3 repeats of lr 0.01 and lr 0.02" in steps(tmp_path)


@pytest.mark.parametrize(("threads", "is_told"), [(None, True), (1, False)])
def test_a_worker_with_all_the_cores_leaves_none_to_a_second(
    threads: int | None, is_told: bool, tmp_path: Path
) -> None:
    settings = {} if threads is None else {"threads": threads}
    more: dict[str, Any] = {"hardware": {"cpu": "a CPU", "cores": 2}}
    write_run(tmp_path, FakeRun("a", settings, [COMPUTE], more=more))
    assert "Try 2 workers" in steps(tmp_path)
    assert ("on more cores than the" in steps(tmp_path)) == is_told


def tie(root: Path, first: list[float], second: list[float]) -> str:
    write_repeats(root, FakeRun("a", {"lr": 0.01}), first)
    write_repeats(root, FakeRun("b", {"lr": 0.02}), second)
    verdict = make_verdict(collect(root).groups)
    assert headline(verdict).startswith("No clear winner")
    return next_steps(verdict)[0]


def test_the_advice_on_a_tie_is_corrected_for_the_same_comparisons_as_the_headline(
    tmp_path: Path,
) -> None:
    """Six approximate groups beside two exact ones: 1 + 15 pairs, not only the exact one."""
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}, [COMPUTE] * 2), [0.99, 1.0, 1.01])
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}, [COMPUTE] * 2), [0.991, 1.001, 1.011])
    for index in range(6):
        settings = {"strategy": "easgd", "lr": 0.1 * (index + 1)}
        write_repeats(tmp_path, FakeRun(f"c{index}", settings, [COMPUTE] * 2), [0.99, 1.0, 1.01])
    verdict = make_verdict(collect(tmp_path).groups)
    assert verdict.lead is not None
    assert verdict.lead.comparisons == 16
    largest = max(abs(verdict.lead.low), abs(verdict.lead.high))
    assert largest > 0.05, "so there is no bound that is small enough to tell"
    assert "differ by at most" not in next_steps(verdict)[0]
    assert next_steps(verdict)[0].startswith("Run ")


def test_noise_that_is_too_large_is_said_to_be(tmp_path: Path) -> None:
    """Runs between 0.5 and 1.5: even 5% is a twentieth of the spread."""
    message = tie(tmp_path, [0.5, 1.0, 1.5], [0.51, 1.01, 1.51])
    assert message.startswith("Reduce the noise before comparing lr 0.01 and lr 0.02")
    assert "too large to say which is faster" in message
    # By hand: 2 (1.96 + 0.84)^2 0.25 / (0.05 1.01)^2 = 1,537, and a few more as t is wider.
    (count,) = [int(word.replace(",", "")) for word in message.split() if word[0].isdigit()
                and "%" not in word and "." not in word]  # fmt: skip
    assert count == pytest.approx(1537, abs=10)


def test_a_difference_too_small_to_matter_is_bounded_instead(tmp_path: Path) -> None:
    """Deviations of 0.1% leave room for a difference of a few tenths of a percent."""
    message = tie(tmp_path, [0.999, 1.0, 1.001], [0.9991, 1.0, 1.0011])
    assert message.startswith("Treat lr 0.01 and lr 0.02 as equally fast")
    assert "they differ by at most 0.2% (95% CI)" in message


def test_repeats_for_a_difference_worth_detecting_are_told_where_this_one_needs_too_many(
    tmp_path: Path,
) -> None:
    message = tie(tmp_path, [0.95, 1.0, 1.05], [0.951, 1.001, 1.051])
    # By hand: 2 (1.96 + 0.84)^2 0.0025 / 0.05^2 = 15.7, and one or two more as t is wider.
    assert message.startswith("Run 17 repeats of lr 0.01 and lr 0.02 to detect a difference of 5%")
    assert "the measured 0.1% would take more than 10,000" in message
