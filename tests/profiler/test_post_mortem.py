"""Post-mortems: what each rank does when training stops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.analysis.collection import collect
from paceline.analysis.events import IN_ITERATION
from paceline.profiler import FACTOR_VARIABLE
from paceline.profiler.collectives.communication import RankCommunication
from paceline.profiler.collectives.log import (
    ASYNC,
    BACKWARD,
    ON_GPU,
    OPERATIONS,
    RECORD,
    GroupInfo,
    RankCollectives,
)
from paceline.profiler.collectives.waiting import separate_waits
from paceline.profiler.post_mortem.end_of_rank import add_last_interval, find_last_wait
from paceline.profiler.post_mortem.examination import (
    add_resumption,
    find_mismatches,
    find_pending,
    joined_records,
    last_progress,
)
from paceline.profiler.post_mortem.process_facts import Frame, parse_stacks
from paceline.profiler.post_mortem.watchdog import Watchdog, _End
from paceline.records import PHASES, EventWriter, RunFolder
from paceline.report.build import build_report
from paceline.report.document import Text
from paceline.report.wording.post_mortem import headline, lines

WORLD = GroupInfo("world", 0, (0, 1, 2), "gloo")
PAIR = GroupInfo("pair", 0, (1, 2), "gloo")

Call = tuple[int, str, int, float]
"""Index of the group, operation, bytes, and time of the end (0: it has not ended)."""


def log(
    rank: int, calls: Sequence[Call], groups: Sequence[GroupInfo] = (WORLD,)
) -> RankCollectives:
    records = np.zeros(len(calls), RECORD)
    numbers: dict[int, int] = {}
    for index, (group, operation, size, end) in enumerate(calls):
        sequence = numbers.setdefault(group, 0)
        numbers[group] += 1
        records[index]["group"], records[index]["sequence"] = group, sequence
        records[index]["operation"] = OPERATIONS.index(operation)
        records[index]["bytes"], records[index]["peer"] = size, -1
        records[index]["arrival"], records[index]["end"] = 1.0 + index, end
    return RankCollectives(rank, 0, "machine", records, list(groups), wall_offset=1000.0)


def test_a_rank_waits_for_those_that_have_not_called_its_collective() -> None:
    done, open_ = (0, "all_reduce", 40, 1.5), (0, "all_reduce", 80, 0.0)
    logs = {0: log(0, [done, open_]), 1: log(1, [done]), 2: log(2, [done, open_])}
    pending = find_pending(logs, now=1010.0)
    assert sorted(pending) == [0, 2]
    assert pending[0].operation == "all_reduce"
    assert (pending[0].group, pending[0].sequence, pending[0].bytes) == ("world", 1, 80)
    assert pending[0].missing == (1,)
    assert pending[0].seconds == pytest.approx(8.0)
    assert find_mismatches(logs) == []
    assert last_progress(list(logs.values())) == pytest.approx(1002.0)


def test_a_rank_waits_in_a_collective_on_a_gpu_only_for_missing_ranks() -> None:
    launched = (0, "all_reduce", 80, 0.0)
    logs = {rank: log(rank, [launched]) for rank in range(3)}
    for one in logs.values():
        one.records["flags"] = ON_GPU
    # The GPU may have executed it long ago.
    assert find_pending(logs, now=1010.0) == {}
    del logs[1]
    assert {rank: one.missing for rank, one in find_pending(logs, now=1010.0).items()} == {
        0: (1,),
        2: (1,),
    }


def test_a_rank_without_any_call_is_missing() -> None:
    logs = {0: log(0, [(0, "broadcast", 8, 0.0)]), 1: log(1, [], [])}
    assert find_pending(logs, 1010.0)[0].missing == (1, 2)


def test_groups_in_a_different_order_wait_for_each_other() -> None:
    waits_in_world = log(1, [(0, "all_reduce", 8, 0.0)], [WORLD, PAIR])
    waits_in_pair = log(2, [(1, "all_reduce", 8, 0.0)], [WORLD, PAIR])
    pending = find_pending({1: waits_in_world, 2: waits_in_pair}, 1010.0)
    assert pending[1].missing == (0, 2)
    assert (pending[2].group, pending[2].missing) == ("pair", (1,))


def test_different_calls_of_one_number_are_named() -> None:
    same = (0, "all_reduce", 40, 1.5)
    logs = {
        0: log(0, [same, (0, "all_reduce", 40, 0.0)]),
        1: log(1, [same, (0, "broadcast", 40, 0.0)]),
        2: log(2, [same, (0, "all_reduce", 40, 0.0)]),
    }
    (mismatch,) = find_mismatches(logs)
    assert mismatch.sequence == 1
    assert [mismatch.calls[rank][0] for rank in range(3)] == [
        "all_reduce",
        "broadcast",
        "all_reduce",
    ]


def account(**phases: float) -> dict[str, Any]:
    spent = {**dict.fromkeys(PHASES, 0.0), **phases}
    return {
        "phases": dict(spent),
        "after_first": {"phases": {name: spent[name] for name in IN_ITERATION}},
        "wall_seconds": sum(spent.values()),
    }


def test_a_killed_rank_waited_from_its_last_collective_to_its_end() -> None:
    done, open_ = (0, "all_reduce", 40, 1.5), (0, "all_reduce", 80, 0.0)
    logs = {0: log(0, [done, open_]), 1: log(1, [done]), 2: log(2, [done])}
    assert find_last_wait(logs, 1) is None
    wait = find_last_wait(logs, 0)
    assert wait is not None
    worker = account(forward=1.0, backward=0.5)
    add_last_interval(worker, recorded_until=1.5, ended=9.0, wait=wait, waited=None)
    # It called the last collective at 2.0.
    assert worker["phases"]["wait"] == pytest.approx(7.0)
    assert worker["phases"]["other"] == pytest.approx(0.5)
    assert worker["unrecorded_seconds"] == pytest.approx(7.5)
    assert worker["wall_seconds"] == pytest.approx(9.0)
    assert worker["after_first"]["phases"]["wait"] == 0


def test_a_backward_pass_that_fails_was_a_wait_for_the_missing_rank() -> None:
    failed = (0, "all_reduce", 80, 8.0)
    logs = {0: log(0, [failed]), 1: log(1, []), 2: log(2, [failed])}
    logs[0].records["flags"] = BACKWARD | ASYNC
    wait = find_last_wait(logs, 0)
    worker = account(forward=1.0, backward=7.5)
    add_last_interval(worker, recorded_until=8.5, ended=8.5, wait=wait, waited=None)
    assert worker["phases"]["wait"] == pytest.approx(7.0)
    assert worker["phases"]["backward"] == pytest.approx(0.5)
    assert worker["after_first"]["phases"]["backward"] == pytest.approx(0.5)
    assert worker["wall_seconds"] == pytest.approx(8.5)


def test_a_collective_that_a_rank_never_called_is_not_communication() -> None:
    done, failed = (0, "all_reduce", 40, 1.5), (0, "all_reduce", 80, 9.0)
    logs = {0: log(0, [done, failed]), 1: log(1, [done])}
    logs[0].records["flags"] = BACKWARD | ASYNC
    own = RankCommunication(logs[0], separate_waits(logs))
    worker = account(forward=1.0, backward=8.0)
    moments = {"start": 0.0, "first": 0.5, "last": 9.0}
    own.account(worker, moments, joined_records(logs, logs[0]))
    assert worker["hidden_exchange_seconds"] == pytest.approx(0.5)
    assert worker["after_first"]["hidden_exchange_seconds"] == pytest.approx(0.5)
    assert worker["collectives"]["all_reduce"]["count"] == 1


def test_a_hang_lasts_until_the_next_progress() -> None:
    """Logs are 1000 s behind the time of day."""
    logs = [log(0, [(0, "all_reduce", 40, 35.0)]), log(1, [])]
    report: dict[str, Any] = {"event": "hang", "time": 1010.0, "seconds": 6.0}
    add_resumption(report, logs, [1003.0, 1040.0])
    assert report["paused_seconds"] == pytest.approx(31.0)
    report = {"event": "hang", "time": 1010.0, "seconds": 6.0}
    add_resumption(report, [log(0, [(0, "all_reduce", 40, 0.0)])], [1003.0])
    assert "paused_seconds" not in report


def test_stacks_are_read_by_thread_and_the_script_is_told_from_libraries() -> None:
    text = textwrap.dedent("""\
        Thread 0x00007f0000000010 (most recent call first):
          File "/usr/lib/python3.11/threading.py", line 320 in wait
        Current thread 0x00007f0000000020 (most recent call first):
          File "/usr/lib/python3.11/site-packages/torch/optim/sgd.py", line 7 in step
          File "/home/me/train.py", line 12 in main
          File "/home/me/train.py", line 20 in <module>
        """)
    stack = parse_stacks(text)[0x00007F0000000020]
    assert stack[1] == Frame("/home/me/train.py", 12, "main")
    assert [frame.is_script for frame in stack] == [False, True, True]


def write_process(folder: Path, process: int, *events: str, rank: str | None) -> None:
    writer = EventWriter(folder / f"process-{process}.jsonl")
    writer.write("process", process=process, rank=rank, main_thread=0, answers=False)
    for event in events:
        writer.write(event)
    writer.close()


@pytest.fixture
def reports() -> list[Any]:
    return []


@pytest.fixture
def watchdog(tmp_path: Path, reports: list[Any]) -> Watchdog:
    return Watchdog(RunFolder(tmp_path), 4.0, reports.append)


def test_programs_that_a_rank_starts_are_not_ranks(tmp_path: Path, watchdog: Watchdog) -> None:
    # Process ids may wrap around, so a later process may have a smaller one.
    write_process(tmp_path, 20, rank="0")
    write_process(tmp_path, 10, rank="0")
    assert {rank: known.process for rank, known in watchdog._ranks().items()} == {0: 20}


def test_a_process_that_trains_is_the_rank_that_it_says(tmp_path: Path, watchdog: Watchdog) -> None:
    write_process(tmp_path, 10, rank=None)
    write_process(tmp_path, 20, rank=None)
    for process, rank in ((10, 1), (20, 0)):
        writer = EventWriter(tmp_path / f"events-{rank}.jsonl")
        writer.write("start", rank=rank, process=process)
        writer.close()
    assert [known.process for known in watchdog._ranks().values()] == [20, 10]


@pytest.mark.parametrize(("events", "expected"), [((), 1), (("stop",), 0), (("exit",), 0)])
def test_a_rank_that_is_not_measured_any_more_does_not_hang(
    tmp_path: Path, watchdog: Watchdog, reports: list[Any], events: tuple[str, ...], expected: int
) -> None:
    write_process(tmp_path, 10, *events, rank="0")
    file = tmp_path / "events-0.jsonl"
    file.touch()
    os.utime(file, (1, 1))
    watchdog._examine_hang()
    assert len(reports) == expected


def test_several_ranks_that_do_the_same_are_named_together() -> None:
    state = {"ended": None, "collective": None, "line": "train.py:3 in load", "stack": [1]}
    ranks = [{"rank": rank, **state} for rank in range(3)]
    assert list(lines({"mismatches": [], "ranks": ranks})) == [
        "ranks 0-2 are not in a collective, at train.py:3 in load"
    ]


def test_ranks_that_a_signal_ends_have_not_failed(
    tmp_path: Path, watchdog: Watchdog, reports: list[Any]
) -> None:
    write_process(tmp_path, os.getpid(), rank="0")
    watchdog.before_stop()
    watchdog._ended[os.getpid()] = _End(time.time(), "killed by SIGINT")
    watchdog._has_new_ends = True
    watchdog._examine_deaths()
    assert reports == []


SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault, last, uses_ddp = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "ddp"
dist.init_process_group("gloo")
is_faulty = dist.get_rank() == 1
model = torch.nn.Linear(10, 10)
if uses_ddp:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def exchange():
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)

def differ():
    if fault == "broadcast" and is_faulty:
        dist.broadcast(torch.zeros(100), 1)
    elif fault == "size" and is_faulty:
        dist.all_reduce(torch.zeros(400))
    else:
        dist.all_reduce(torch.zeros(100))

def stall():
    time.sleep(1000)

for step in range(last + 2):
    model(torch.randn(4, 10)).sum().backward()
    if not uses_ddp:
        exchange()
    if step == last and is_faulty:
        number = dist.group.WORLD._get_sequence_number_for_group()
        Path(__file__).with_name("number").write_text(str(number))
    if step == last and fault in ("broadcast", "size"):
        differ()
    optimizer.step()
    optimizer.zero_grad()
    if is_faulty and step == last:
        if fault == "stall":
            stall()
        elif fault == "raise":
            raise ValueError("a bad sample")
        elif fault == "kill":
            os.kill(os.getpid(), 9)
"""

PATIENCE_SECONDS = 90


RECORDED, PAUSED = 4, 40
"""The step in which a rank fails: those of the script are recorded, and those of DDP are not in a
step after the first windows, if one in eight windows is recorded."""


@pytest.fixture(params=[RECORDED, PAUSED], ids=["recorded", "paused"])
def last(request: pytest.FixtureRequest) -> int:
    step: int = request.param
    return step


@contextlib.contextmanager
def profiled(folder: Path, fault: str, last: int = RECORDED) -> Iterator[subprocess.Popen[str]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    paceline = [sys.executable, "-m", "paceline", "profile", "--quiet", "--hang-seconds", "4"]
    options = ["--out", str(folder), "--name", "run"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    faults = [fault, str(last), "ddp" if last == PAUSED else "script"]
    process = subprocess.Popen(
        [*paceline, *options, "--", *launcher, "--nproc-per-node=2", script, *faults],
        env={**os.environ, FACTOR_VARIABLE: "8"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def wait_for_report(folder: Path) -> dict[str, Any]:
    file = folder / "run" / "post-mortem.json"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, "no post-mortem"
        time.sleep(0.05)
    report: dict[str, Any] = json.loads(file.read_text())["reports"][0]
    return report


def number_of_last(folder: Path) -> int:
    """How many collectives the faulty rank had called before it failed."""
    return int((folder / "number").read_text())


def read_result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return values


def test_a_stalled_rank_is_named_with_its_line(tmp_path: Path, last: int) -> None:
    with profiled(tmp_path, "stall", last):
        report = wait_for_report(tmp_path)
    waiting, stalled = report["ranks"]
    assert report["event"] == "hang"
    assert report["seconds"] >= 4
    assert waiting["collective"]["operation"] == "all_reduce"
    # Process groups count from 1, and records from 0.
    sequence, size = number_of_last(tmp_path), 440 if last == PAUSED else 400
    assert waiting["collective"]["sequence"] == sequence
    assert waiting["collective"]["bytes"] == size
    assert waiting["collective"]["missing_ranks"] == [1]
    assert waiting["line"].startswith("train.py:")
    assert stalled["collective"] is None
    assert stalled["line"].endswith(" in stall")
    text = [headline(report), *lines(report)]
    assert text[1].startswith("rank 1 is not in a collective, at train.py:")
    assert text[2].startswith(
        f"rank 0 waits for rank 1 in all_reduce of {size} B (number {sequence} of group 0) for"
    )
    # The job was ended, and the page says the same.
    result = read_result(tmp_path)
    assert result["status"] == "stopped"
    assert result["post_mortem"] == [report]
    assert not list((tmp_path / "run").glob("stacks-*"))
    document, _ = build_report(collect(tmp_path / "run"))
    assert document.chapters[0].sections[0].title == "Why training stopped"
    (phases,) = [one for one in document.chapters[0].sections if one.name == "phases"]
    texts = [block.text for block in phases.blocks if isinstance(block, Text)]
    assert any(text.startswith("Not recorded, because the ranks were ended") for text in texts)
    # Nobody recorded the hang, but it is in the account: rank 0 waits, and rank 1 does not train.
    for worker, phase in zip(result["workers"], ("wait", "other"), strict=True):
        assert worker["unrecorded_seconds"] >= report["seconds"] - 1
        assert worker["phases"][phase] >= report["seconds"] - 1
        assert sum(worker["phases"].values()) == pytest.approx(worker["wall_seconds"])
        # It is not part of a step.
        assert worker["after_first"]["phases"]["wait"] < 4


def test_different_collectives_are_named_while_ranks_wait(tmp_path: Path, last: int) -> None:
    with profiled(tmp_path, "broadcast", last):
        report = wait_for_report(tmp_path)
    (mismatch,) = report["mismatches"]
    number = number_of_last(tmp_path)
    assert mismatch["sequence"] == number
    # A call of the script is recorded before it is issued.
    assert next(lines(report)) == (
        f"The ranks call different collectives as number {number} of group 0: rank 0 all_reduce"
        " of 400 B, rank 1 broadcast of 400 B with root 1"
    )


def test_different_sizes_are_named_although_gloo_aborts_the_process(
    tmp_path: Path, last: int
) -> None:
    with profiled(tmp_path, "size", last) as process:
        process.wait(timeout=PATIENCE_SECONDS)
    (report,) = read_result(tmp_path)["post_mortem"]
    assert headline(report) == "Rank 0 failed first: killed by SIGABRT."
    (mismatch,) = report["mismatches"]
    assert mismatch["sequence"] == number_of_last(tmp_path)
    assert [call["bytes"] for call in mismatch["calls"]] == [400, 1600]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("raise", "ValueError: a bad sample"), ("kill", "killed by SIGKILL")],
)
def test_the_rank_that_fails_first_is_named(
    tmp_path: Path, fault: str, text: str, last: int
) -> None:
    with profiled(tmp_path, fault, last) as process:
        process.wait(timeout=PATIENCE_SECONDS)
    result = read_result(tmp_path)
    (report,) = result["post_mortem"]
    assert (result["status"], report["event"]) == ("failed", "death")
    assert report["first_rank"] == 1
    assert headline(report) == f"Rank 1 failed first: {text}."


def test_a_report_survives_the_profiler(tmp_path: Path) -> None:
    with profiled(tmp_path, "stall") as process:
        report = wait_for_report(tmp_path)
        ranks = [state["process"] for state in report["ranks"]]
        process.kill()
        process.wait()
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
    assert json.loads((tmp_path / "run" / "post-mortem.json").read_text())["reports"] == [report]
