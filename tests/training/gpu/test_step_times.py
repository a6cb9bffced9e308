"""Measured step times are kept between runs, so that the same configuration stays the same run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.config import from_mapping
from paceline.training.gpu.precision import Format, Measurement
from paceline.training.gpu.step_times import describe_step, remembered

FORMATS = [Format("fp32"), Format("bf16"), Format("bf16", channels_last=True)]


class Timer:
    """Gives other times in each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, formats: Sequence[Format]) -> Measurement:
        self.calls += 1
        times = {one: 0.5 / (number + self.calls) for number, one in enumerate(formats[:-1])}
        return Measurement(times, "eager", {formats[-1]: "not supported"}, seconds=1.5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "step-times.json"


def test_second_run_uses_the_times_of_the_first(file: Path) -> None:
    timer = Timer()
    first, second = (remembered(timer, "step", file)(FORMATS) for _ in range(2))
    assert timer.calls == 1
    assert second.step_seconds == first.step_seconds
    assert list(second.step_seconds) == FORMATS[:2]
    assert (second.method, second.failures) == (first.method, first.failures)
    assert (first.is_from_earlier_run, second.is_from_earlier_run) == (False, True)


def test_other_steps_and_other_formats_are_measured(file: Path) -> None:
    timer = Timer()
    remembered(timer, "step", file)(FORMATS)
    remembered(timer, "other step", file)(FORMATS)
    remembered(timer, "step", file)(FORMATS[:2])
    assert timer.calls == 3
    remembered(timer, "step", file)(FORMATS)
    assert timer.calls == 3, "the first entry is still there"


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"step fp32, bf16, bf16 channels-last": {"step_seconds": 3}}']
)
def test_damaged_file_means_measuring_again(file: Path, content: str) -> None:
    timer = Timer()
    file.parent.mkdir()
    file.write_text(content)
    for _ in range(2):
        remembered(timer, "step", file)(FORMATS)
    assert timer.calls == 1


def test_folder_that_cannot_be_written_means_measuring_every_time(tmp_path: Path) -> None:
    timer = Timer()
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        remembered(timer, "step", tmp_path / "cache" / "step-times.json")(FORMATS)
    assert timer.calls == 2


def test_failed_measurement_is_not_kept(file: Path) -> None:
    def fail(formats: Sequence[Format]) -> Measurement:
        return Measurement({}, "eager", dict.fromkeys(formats, "out of memory"), seconds=1.0)

    timer = Timer()
    remembered(fail, "step", file)(FORMATS)
    remembered(timer, "step", file)(FORMATS)
    assert timer.calls == 1


def test_step_is_described_by_what_changes_its_time() -> None:
    def describe(width: int = 3, captured: bool = True, **settings: object) -> str:
        config = from_mapping({"model": "mlp", "batch_size": 8, **settings})
        model = nn.Linear(2, width)
        return describe_step(config, model, torch.device("cpu"), 100, captured=captured)

    assert describe() == describe(seed=4, lr=0.5)
    different = [
        describe(),
        describe(width=4),
        describe(captured=False),
        describe(batch_size=16),
        describe(model="lenet"),
        describe(model_options={"width": 2}),
        describe(data="plain_digits"),
    ]
    assert len(set(different)) == len(different)
