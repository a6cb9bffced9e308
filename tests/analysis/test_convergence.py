"""From which epoch on a test loss moved no more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.analysis.accuracy import convergence_epoch, summarize_accuracy
from paceline.analysis.collection import collect
from paceline.report.sections.learning import accuracy_answer
from tests.support.records import FakeRun, write_run


@pytest.mark.parametrize(
    ("losses", "epoch"),
    [
        ([2.0, 1.0, 0.505, 0.5, 0.499, 0.5, 0.501, 0.5, 0.499, 0.5], 3),
        # Each step is small, and they go on.
        ([1.0 - 0.015 * epoch for epoch in range(10)], None),
        # The last two are near each other, as they always are.
        ([2.0, 1.5, 1.0, 0.8, 0.7, 0.65, 0.6, 0.57, 0.55, 0.545], None),
        # It blew up at first: that says nothing of the end.
        ([400.0, 3.0, 2.5, 2.0, 1.8], None),
        ([0.5, 0.5], None),
    ],
)
def test_a_loss_has_converged_once_it_stays_near_its_end(
    losses: list[float], epoch: int | None
) -> None:
    history = [{"epoch": number + 1, "test_loss": loss} for number, loss in enumerate(losses)]
    run: Any = SimpleNamespace(history=history)
    assert convergence_epoch(run) == epoch


def test_two_evaluations_do_not_tell_whether_a_loss_still_moves(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a"))
    message = accuracy_answer(summarize_accuracy(collect(tmp_path).groups))
    assert message == "lenet on digits, single: test accuracy 0.9000."
