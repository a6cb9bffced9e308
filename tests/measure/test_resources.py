"""Summary of the resource samples of a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.measure.resources import read_resources, summarize


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "resources-0.jsonl"


def sample(started: float, seconds: float, **values: object) -> dict[str, object]:
    return {"node": 1, "started": started, "seconds": seconds, "gpus": [], **values}


def write(path: Path, samples: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in samples))


def test_segments_of_a_resumed_run_are_combined(path: Path) -> None:
    write(
        path,
        [
            sample(10.0, 0.0, network_bytes_sent=0, cpu_percent=None, rss_bytes=5),
            sample(10.0, 1.0, network_bytes_sent=300, cpu_percent=100.0, rss_bytes=10),
            # A pause of one hour, which has no weight.
            sample(3610.0, 0.0, network_bytes_sent=0, cpu_percent=None, rss_bytes=70),
            sample(3610.0, 3.0, network_bytes_sent=50, cpu_percent=20.0, rss_bytes=30),
        ],
    )
    summary = summarize(path, 1)
    assert summary["node"] == 1
    assert summary["sampled_seconds"] == 4.0
    assert summary["network_bytes_sent"] == 350
    assert summary["cpu_percent_mean"] == (1 * 100 + 3 * 20) / 4
    assert summary["rss_bytes_mean"] == (1 * 10 + 3 * 30) / 4
    assert summary["rss_bytes_peak"] == 70


def test_each_gpu_has_its_own_summary(path: Path) -> None:
    def gpu(utilisation: int, memory: int, power: float | None) -> dict[str, object]:
        return {
            "gpu": 0,
            "utilisation_percent": utilisation,
            "memory_used_bytes": memory,
            "power_watts": power,
        }

    write(
        path,
        [
            sample(1.0, 0.0, gpus=[gpu(99, 9, None), gpu(0, 1, 50.0)]),
            sample(1.0, 0.5, gpus=None),
            sample(1.0, 1.0, gpus=[gpu(50, 5, None), gpu(10, 3, 60.0)]),
            sample(1.0, 4.0, gpus=[gpu(90, 7, None), gpu(30, 2, 80.0)]),
        ],
    )
    first, second = summarize(path, 0)["gpus"]
    assert first == {
        "gpu": 0,
        "utilisation_percent_mean": (0.5 * 50 + 3 * 90) / 3.5,
        "utilisation_percent_training_mean": None,
        "memory_used_bytes_peak": 9,
        "power_watts_mean": None,
    }
    assert second["power_watts_mean"] == (0.5 * 60 + 3 * 80) / 3.5


def test_busy_share_in_training_leaves_out_start_up_and_end(path: Path) -> None:
    def at(seconds: float, percent: int) -> dict[str, object]:
        gpu = {"gpu": 0, "utilisation_percent": percent}
        return sample(1000.0, seconds, time=1000.0 + seconds, gpus=[gpu])

    write(path, [at(0, 0), at(1, 10), at(2, 20), at(3, 90), at(4, 100), at(5, 50)])
    # The sample at 2 s represents the second before it, of which training has only a half.
    (gpu,) = summarize(path, 0, training=(1001.5, 1004.0))["gpus"]
    assert gpu["utilisation_percent_training_mean"] == 95
    assert gpu["utilisation_percent_mean"] == 54


def test_truncated_and_invalid_lines_are_skipped(path: Path) -> None:
    whole = sample(1.0, 0.0)
    path.write_text(json.dumps(whole) + '\n[1]\n{"other": 1}\n{"node": 1, "star')
    assert read_resources(path) == [whole]


def test_no_samples_give_an_empty_summary(path: Path) -> None:
    summary = summarize(path, 2)
    assert summary["node"] == 2
    assert summary["cpu_percent_mean"] is None
    assert summary["rss_bytes_peak"] is None
    assert summary["network_bytes_sent"] == 0
    assert summary["gpus"] == []
