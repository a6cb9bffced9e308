"""What workers tell at their end: reports of other nodes may be malformed or forged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from paceline.comm.communicator import Communicator
from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import RunSettings, from_mapping
from paceline.errors import LONGEST_LINE, MOST_LINES
from paceline.launch import record_collection
from paceline.launch.messages import MESSAGE_BYTES_MAX, MalformedError
from paceline.launch.record_collection import (
    WARNINGS_MAX,
    collect_records,
    parse_gathered,
    parse_report,
    put_record,
    read_reports,
    receive_files,
    send_files,
    write_report,
)
from paceline.launch.result import training_interval, write_result
from paceline.measure.startup import STARTUP_PARTS
from paceline.records import BETWEEN_ITERATIONS, MEMORY_KEYS, PHASES, TRAFFIC_KINDS, RunFolder
from paceline.report.summary import print_summary
from tests.support.commands import names_in

COUNT = {"bytes_sent": 1, "bytes_received": 1, "messages": 1, "seconds": 0.1}
EVALUATION = {
    "iteration": 12,
    "epoch": 1.0,
    "seconds": 0.5,
    "test_loss": 0.25,
    "test_accuracy": 0.75,
    "metrics": {"accuracy": 0.75, "perplexity": None},
    "train_loss": 0.5,
    "learning_rate": 0.1,
}


def report_of(rank: int) -> dict[str, Any]:
    """The report of a worker that has finished."""
    phases = dict.fromkeys(PHASES, 0.125)
    steady = {name: 0.1 for name in PHASES if name not in BETWEEN_ITERATIONS}
    return {
        "status": "finished",
        "cause": None,
        "exit_code": 0,
        "is_secondary": False,
        "ended": 5.0,
        "is_together": True,
        "iterations": 12,
        "weights_sha256": "ab" * 32,
        "train_loss": 0.5,
        "seconds_to_target": None,
        "history": [EVALUATION],
        "worker": {
            "rank": rank,
            "node": rank,
            "samples": 64,
            "wall_seconds": sum(phases.values()),
            "iteration_seconds": {"first": 0.2, "mean": 0.1, "median": 0.1, "p95": 0.1},
            "phases": phases,
            "hidden_exchange_seconds": 0.0,
            "after_first": {
                "iterations": 11,
                "phases": steady,
                "hidden_exchange_seconds": 0.0,
                "bytes_sent": dict.fromkeys(TRAFFIC_KINDS, 7),
            },
            "traffic": {kind: dict(COUNT) for kind in TRAFFIC_KINDS},
            "startup_seconds": dict.fromkeys(STARTUP_PARTS, 0.1),
            "kernel_time": None,
            "memory": dict.fromkeys(MEMORY_KEYS, 10_000),
            "numerics": {
                "precision": "bf16",
                "channels_last": True,
                "reason": "measured",
                "step_seconds": {"fp32": 0.2, "bf16 channels-last": 0.1},
            },
        },
        "checkpoints": {"count": 0, "bytes": 0, "blocked_seconds": 0.0},
        "measuring_fraction": 0.01,
        "warnings": [],
        "samples_before": 0,
    }


def changed(value: Any, path: str, rank: int = 1) -> dict[str, Any]:
    """A report with another value at this path."""
    report: dict[str, Any] = json.loads(json.dumps(report_of(rank)))
    *way, last = path.split(".")
    place: Any = report
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[last] = value
    return report


NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]

BAD = [
    (NAN, "worker.phases.forward"),
    ({}, "worker.phases"),
    ({**dict.fromkeys(PHASES, 0.1), "extra": 0.1}, "worker.phases"),
    ("1", "worker.phases.forward"),
    (HUGE, "train_loss"),
    (1e300, "train_loss"),
    (-1, "iterations"),
    (-1, "samples_before"),
    (256, "exit_code"),
    (-1, "worker.samples"),
    (HUGE, "worker.samples"),
    (0, "worker.wall_seconds"),
    (0, "worker.rank"),
    (-1, "worker.node"),
    (INFINITE, "worker.iteration_seconds.mean"),
    ({}, "worker.iteration_seconds"),
    ({}, "worker.traffic"),
    (NAN, "worker.traffic.gradients.seconds"),
    ([], "worker.traffic.gradients"),
    (NAN, "worker.after_first.phases.forward"),
    (-1, "worker.after_first.iterations"),
    ("much", "worker.after_first.bytes_sent.gradients"),
    ("much", "worker.memory.peak_bytes"),
    ({}, "worker.startup_seconds"),
    ({"iterations": 1}, "worker.kernel_time"),
    ({"captured": True}, "worker.cuda_graph"),
    ({}, "worker.numerics"),
    ("bf16", "worker.numerics"),
    (None, "worker.numerics.precision"),
    ("on", "worker.numerics.channels_last"),
    (5, "worker.numerics.reason"),
    ([0.1], "worker.numerics.step_seconds"),
    ("1", "worker.numerics.step_seconds.fp32"),
    (NAN, "worker.extra"),
    ({"of": [HUGE]}, "worker.extra"),
    (DEEP, "worker.extra"),
    (NAN, "history.0.test_loss"),
    (NAN, "history.0.metrics.perplexity"),
    ("x", "history.0.metrics"),
    ("x", "history.0.test_accuracy"),
    (None, "history.0.iteration"),
    (5, "history"),
    ([5], "history"),
    ([5], "warnings"),
    (NAN, "checkpoints.bytes"),
    ({}, "checkpoints"),
]
IDS = [f"{path}={value!r:.20}" for value, path in BAD]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = from_mapping({"out": str(tmp_path), "name": "run", "nnodes": 2})
    return RunFolder.create(config)


def packed(report: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**report, **more}).encode()


def test_a_report_is_read_as_it_was_written(folder: RunFolder) -> None:
    report = parse_report(report_of(1), "report", 1)
    write_report(folder, 1, report)
    assert read_reports(folder, range(2)) == [report]
    assert report.worker == report_of(1)["worker"]


@pytest.mark.parametrize(("value", "path"), BAD, ids=IDS)
def test_a_malformed_value_at_any_level_drops_only_its_report(
    value: object, path: str, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        put_record(folder, "report-0.json", packed(report_of(0), schema=1))
        put_record(folder, "report-1.json", packed(changed(value, path), schema=1))
    reports = read_reports(folder, range(2))
    config = folder.read_config()
    result = write_result(RunSettings.of(config), folder, reports)
    print_summary(folder, result)
    assert result["status"] == "finished"
    assert [worker["rank"] for worker in result["workers"]] == [0]
    assert result["warnings"] == ["no records from rank 1: totals do not include them"]
    [record] = [each for each in caplog.records if each.name == "paceline"]
    assert "report-1.json" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(
    "lines",
    [
        [{"started": 1, "seconds": NAN}, {"started": 1, "seconds": 2, "sampler_cpu_seconds": 1}],
        [{"started": 1, "seconds": 1}, {"started": 1, "seconds": HUGE, "rss_bytes": 1.5}],
        [{"started": 1, "seconds": 1, "rss_bytes": "x"}, {"started": 1, "seconds": 2}],
        [{"started": 1, "seconds": "x"}, {"started": 1, "seconds": 2}],
        [{"started": [1], "seconds": 1}],
        [{"started": 1, "seconds": 1, "gpus": 5}],
    ],
)
def test_malformed_samples_of_a_node_drop_only_its_resources(
    lines: list[dict[str, Any]], folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    put_record(folder, "resources-1.jsonl", "\n".join(map(json.dumps, lines)).encode())
    reports = [parse_report(report_of(rank), "report", rank) for rank in range(2)]
    with caplog.at_level(logging.WARNING, "paceline"):
        result = write_result(folder.read_settings(), folder, reports)
    assert (result["status"], len(result["workers"])) == ("finished", 2)
    assert [node["samples"] for node in result["nodes"]] == [0, 0]
    assert "resources-1.jsonl" in caplog.text


@pytest.mark.parametrize("contents", [packed(changed(NAN, "worker.phases.forward")), b"{", b"5"])
def test_a_malformed_report_in_a_shared_folder_is_ignored(
    contents: bytes, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    write_report(folder, 0, parse_report(report_of(0), "report", 0))
    folder.report_file(1).write_bytes(contents)
    with caplog.at_level(logging.WARNING, "paceline"):
        reports = read_reports(folder, range(2))
    assert [report.worker["rank"] for report in reports] == [0]
    assert "report-1.json" in caplog.text


def test_the_report_of_a_long_run_is_taken(folder: RunFolder) -> None:
    report = {**report_of(1), "history": [EVALUATION] * 10_000}
    write_report(folder, 1, parse_report(report, "report", 1))
    store, name = HashStore(), folder.report_file(1).name
    assert (folder.path / name).stat().st_size > MESSAGE_BYTES_MAX
    send_files(store, 1, folder.path, [name])
    folder.report_file(1).unlink()
    receive_files(store, 1, lambda name, data: put_record(folder, name, data), {name})
    [taken] = read_reports(folder, range(2))
    assert len(taken.history) == 10_000


def test_text_of_another_node_cannot_control_a_terminal() -> None:
    odd, escaped = "\x1b[2J\n\u202e", "\\x1b[2J\\n\\u202e"
    values = changed(odd, "worker.extra")
    values |= {"weights_sha256": odd, "warnings": [odd, "x" * 100_000], "cause": odd}
    values["worker"][odd] = [{odd: odd}]
    report = parse_report({**values, "status": "failed", "exit_code": 1}, "report", 1)
    texts = [report.cause, report.weights_sha256, *report.warnings, report.worker["extra"]]
    texts += [text for each in report.worker[escaped] for text in (*each, *each.values())]
    assert all(text and text.isprintable() for text in texts), texts
    assert len(report.warnings[1]) <= LONGEST_LINE


def test_only_some_of_many_warnings_are_kept() -> None:
    values = {**report_of(1), "warnings": [f"warning {number}" for number in range(5_000)]}
    warnings = parse_report(values, "report", 1).warnings
    assert len(warnings) == WARNINGS_MAX + 1
    assert warnings[0] == "warning 0"
    assert warnings[-1] == "rank 1: 4,980 more warnings"


@pytest.mark.parametrize(("code", "lines"), [(1, 1), (2, MOST_LINES), (130, 1)])
def test_only_rejected_settings_have_several_lines(code: int, lines: int) -> None:
    values = {**report_of(1), "status": "failed", "exit_code": code, "cause": "line\n" * 500_000}
    cause = parse_report(values, "report", 1).cause
    assert cause is not None
    assert len(cause.splitlines()) == lines
    assert len(cause) <= LONGEST_LINE


def test_a_malformed_report_from_a_worker_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = [packed(report_of(0)), b"{", packed(report_of(0)), packed(report_of(3))]
    tensors = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in sent]
    with caplog.at_level(logging.WARNING, "paceline"):
        reports = parse_gathered(tensors)
    assert [report.worker["rank"] for report in reports] == [0, 3], "nobody else is rank 0"
    assert [record.getMessage().split(" received")[0] for record in caplog.records] == [
        "malformed report of rank 1",
        "malformed report of rank 2",
    ]


def test_reports_are_removed_only_once_they_were_read(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong while they are read, they can be read again."""

    class Pair:
        world_size = 2

        def barrier(self) -> Pair:
            return self

        def wait(self) -> None:
            pass

    def fail(_: object) -> None:
        raise MalformedError("report", "a fault of the test")

    report = parse_report(report_of(0), "report", 0)
    write_report(folder, 0, report)
    communicator = cast("Communicator", Pair())
    monkeypatch.setattr(record_collection, "gather_bytes", lambda _, packed, kind: [packed])
    monkeypatch.setattr(record_collection, "_collect_files", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(record_collection, "parse_gathered", fail)
        with pytest.raises(MalformedError):
            collect_records(folder, SINGLE_PROCESS, communicator, report, shares_folder=True)
    assert "report-0.json" in names_in(folder.path)
    collected = collect_records(folder, SINGLE_PROCESS, communicator, report, shares_folder=True)
    assert collected == [report]
    assert names_in(folder.path) == {"config.json"}


@pytest.mark.parametrize(
    ("times", "expected"), [([], None), ([5.0], None), ([5.0, 6.0, 9.0], (5.0, 9.0))]
)
def test_training_lasts_from_the_first_to_the_last_block_of_iterations(
    tmp_path: Path, times: list[float], expected: tuple[float, float] | None
) -> None:
    folder = RunFolder(tmp_path)
    events = [{"event": "start", "time": 1.0}, {"event": "end", "time": 99.0}]
    events[1:1] = [{"event": "iterations", "time": each} for each in times]
    folder.events_file(0).write_text("".join(json.dumps(one) + "\n" for one in events))
    assert training_interval(folder) == expected
