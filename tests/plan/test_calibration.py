"""Calibration files: what is written is read back, and damage is one clear line."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RecordsError
from paceline.plan.calibration import (
    Calibration,
    CodecTiming,
    MeasuredRun,
    SideBySide,
    SizePoint,
)
from paceline.plan.learning import Learning
from paceline.plan.links import Link, parse_link
from tests.support.calibrations import calibration


def complete() -> Calibration:
    """Every field has a value that differs from its default."""
    run = MeasuredRun(
        "ddp", {"bucket_mib": "4"}, "gloo", 2, 2, Link(1e9, 1e-3), 32, 0.1,
        {"forward": 0.05, "backward": 0.05}, 0.01, 0.02, "runs/two", 63,
    )  # fmt: skip
    values = {
        **{name: getattr(calibration(), name) for name in Calibration.__slots__},
        "codec_timings": (CodecTiming("bf16", 2, (SizePoint(4, (0.1,)),), has_matrices=False),),
        "cores_per_worker": 0.5,
        "side_by_side": (SideBySide(1, (0.1,)),),
        "learning": Learning(32.0, 64),
        "has_tensor_sizes": False,
        "script": "train.py",
        "script_words": {"32": ("train.py", "--batch", "32")},
        "other_processes_share": 0.1,
        "clusters": ("cpus=0.5,bandwidth=1gbit",),
        "settings": {"optimizer": "adam"},
        "runs": (run,),
        "optimizer_state_bytes": 1000,
        "activation_bytes_per_sample": 5e3,
        "has_ready_times": False,
        "software": {"torch": "2.13.0"},
    }
    return Calibration(**values)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    for each in fields(Calibration):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        assert getattr(complete(), each.name) != default, each.name
    path = tmp_path / "calibration.json"
    complete().write(path)
    assert Calibration.read(path) == complete()


def test_optional_fields_may_be_missing() -> None:
    record = json.loads(json.dumps(calibration().to_dict()))
    for name in ("cores_per_worker", "runs", "software", "has_ready_times"):
        del record[name]
    assert Calibration.from_dict(record) == calibration()
    assert Calibration.from_dict({**record, "codecs": []}) == calibration()


def test_fields_of_earlier_calibrations_are_read() -> None:
    record = json.loads(json.dumps(calibration().to_dict()))
    contention = {"compute_slowdown": 1.0, "communication_slowdown": 1.0, "cores_per_worker": 0.5}
    found = Calibration.from_dict({**record, "contention": contention, "cluster": "cpus=1"})
    assert (found.cores_per_worker, found.clusters) == (0.5, ("cpus=1",))
    shared = [{**RUN, "strategy": "shared", "hosts": hosts} for hosts in (1, 2)]
    found = Calibration.from_dict({**record, "runs": [*shared, RUN]})
    assert [run.backend for run in found.runs] == ["shm", "hierarchical", "gloo"]


RUN = {
    "strategy": "ring", "options": {}, "backend": "gloo", "workers": 2, "hosts": 2, "link": None,
    "samples": 32, "step_seconds": 0.1, "phases": {},
}  # fmt: skip


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
        ({"runs": [{**RUN, "workers": 0}]}, "runs must have workers, hosts, samples and"),
        ({"runs": [{**RUN, "step_seconds": 0.0}]}, "runs must have workers, hosts, samples and"),
        ({"runs": [{**RUN, "hosts": 5}]}, "runs must have a worker on each host"),
        ({"runs": [{**RUN, "workers": True}]}, "True is not of type int"),
        ({"runs": [{**RUN, "workers": 10**400}]}, "an integer is too large"),
        ({"runs": [{**RUN, "link": {"bits_per_second": 0.0}}]}, "links must have a bandwidth"),
        (
            {"side_by_side": [{"workers": 2, "step_seconds": [0.1, 0.1]}]},
            "one worker, and each other number of workers, must be measured once",
        ),
        (
            {"codec_timings": [{"codec": "bf16", "workers": 0, "points": []}]},
            "codecs must have workers",
        ),
        (
            {
                "codec_timings": [
                    {
                        "codec": "bf16",
                        "workers": 2,
                        "points": [
                            {"size_bytes": 64, "seconds": [0.1]},
                            {"size_bytes": 64, "seconds": [0.1]},
                        ],
                    }
                ]
            },
            "codecs must have different sizes",
        ),
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
