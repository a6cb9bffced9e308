"""Calibration files: what is written is read back, and damage is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecordsError
from paceline.plan.calibration import (
    Calibration,
    Contention,
    MeasuredRun,
)
from paceline.plan.links import Link, parse_link
from tests.support.calibrations import calibration


def complete() -> Calibration:
    """Every field has a value that differs from its default."""
    run = MeasuredRun(
        "ddp", {"bucket_mib": "4"}, "gloo", 2, 2, Link(1e9, 1e-3), 32, 0.1,
        {"forward": 0.05, "backward": 0.05}, 0.01, 0.02, "runs/two",
    )  # fmt: skip
    values = {
        **{name: getattr(calibration(), name) for name in Calibration.__slots__},
        "contention": Contention(1.2, 1.1, 0.5),
        "runs": (run,),
        "optimizer_state_bytes": 1000,
        "activation_bytes_per_sample": 5e3,
        "has_ready_times": False,
        "software": {"torch": "2.13.0"},
    }
    return Calibration(**values)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    complete().write(path)
    assert Calibration.read(path) == complete()


def test_optional_fields_may_be_missing() -> None:
    record = json.loads(json.dumps(calibration().to_dict()))
    for name in ("contention", "runs", "software", "has_ready_times"):
        del record[name]
    assert Calibration.from_dict(record) == calibration()
    assert Calibration.from_dict({**record, "codecs": []}) == calibration()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "comm"}, "is not a calibration"),
        ({"version": 99}, "has version 99 of calibrations"),
        ({"gradients": []}, "gradients must have sizes above 0"),
        ({"gradients": [{"size_bytes": 4, "ready": 2.0}]}, "must be ready from 0 to 1"),
        ({"gradients": [{"size_bytes": "4", "ready": 1.0}]}, "'4' is not of type int"),
        ({"gradients": 4}, "a list is missing"),
        ({"residuals": [[None]]}, "None is not a finite number"),
        ({"speed": 3}, "Calibration has no speed"),
        ({"compute": [{"samples": 4, "phases": {"forward": 1.0}}]}, "must have the phases input"),
    ],
)
def test_damage_is_one_line_that_names_the_file(change: dict[str, Any], message: str) -> None:
    record = json.loads(json.dumps({**calibration().to_dict(), **change}))
    with pytest.raises(RecordsError) as caught:
        Calibration.from_dict(record, "plan/c.json")
    assert str(caught.value).startswith("plan/c.json ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_times_of_a_collective_give_latency_and_bandwidth() -> None:
    library = next(each for each in calibration().collectives if each.algorithm == "library")
    line = library.line()
    assert line is not None
    assert line.latency_seconds == pytest.approx(1e-3, rel=1e-6)
    assert line.bytes_per_second == pytest.approx(100e6, rel=1e-6)


@pytest.mark.parametrize("text", ["10gbit,100us", "1gbit", "2.5gbit,1ms", "100mbit,50ms"])
def test_a_link_is_printed_as_it_is_parsed(text: str) -> None:
    assert str(parse_link(text)) == text
    assert parse_link(str(parse_link(text))) == parse_link(text)


@pytest.mark.parametrize("text", ["", "10", "fast", "1gbit,2", "0gbit", "1gbit,-1ms", "1gbit,5s"])
def test_an_invalid_link_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 10gbit,100us"):
        parse_link(text)
