"""Perfetto reads the trace of a run: complete, with names, and all ranks on one clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.launch.launcher import train
from paceline.records import read_json
from tests.support.perfetto import Query, trace_processor

pytestmark = [pytest.mark.browser, pytest.mark.perfetto, pytest.mark.timeout(300)]

SLICES = """
from slice
join thread_track on slice.track_id = thread_track.id
join thread using (utid)
join process using (upid)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a traced run of two workers with several transfers per step."""
    out = tmp_path_factory.mktemp("runs")
    config = RunConfig(
        data="digits",
        train_samples=64,
        test_samples=16,
        model="lenet",
        batch_size=16,
        iterations=8,
        strategy="overlap",
        options={"bucket_mib": "0.01", "first_bucket_mib": "0.01"},
        nproc_per_node=2,
        threads=1,
        trace=4,
        out=str(out),
        name="run",
        sample_seconds=0,
        tensorboard=False,
    )
    assert train(config, quiet=True).exit_code == 0
    return out / "run"


@pytest.fixture(scope="module")
def query(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Query]:
    with trace_processor(run / "trace.json", tmp_path_factory.mktemp("profile")) as query:
        yield query


def traces(run: Path) -> list[dict[str, Any]]:
    return [read_json(run / f"trace-{rank}.json") for rank in range(2)]


def nanoseconds(trace: dict[str, Any], category: str) -> dict[str, int]:
    """By name, the time of the events of a rank's own file."""
    sums: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event.get("cat") == category:
            sums[event["name"]] += round(event["dur"] * 1e3)
    return sums


def test_nothing_is_lost_on_import(query: Query, run: Path) -> None:
    assert query("select name from stats where severity in ('error', 'data_loss') and value") == []
    events = [event for trace in traces(run) for event in trace["traceEvents"]]
    assert query("select count(*) from slice") == [[sum(event["ph"] == "X" for event in events)]]
    # Events of one thread that overlap would be nested in one another.
    assert query("select max(depth) from slice") == [[0]]


def test_slices_add_up_to_the_phases_of_each_rank(query: Query, run: Path) -> None:
    for rank, trace in enumerate(traces(run)):
        for thread, category in [("phases", "phase"), ("transfers", "transfer")]:
            rows = query(
                f"select slice.name, sum(dur) {SLICES} where process.name = 'rank {rank}'"
                f" and thread.name = '{thread}' group by 1"
            )
            sums = {str(name): int(total) for name, total in rows}
            assert sums == nanoseconds(trace, category)


def test_every_thread_has_a_name_and_steps_come_first(query: Query) -> None:
    rows = query(
        f"select distinct process.name, thread.name, is_main_thread {SLICES} order by 1, tid"
    )
    for rank in range(2):
        threads = [row[1:] for row in rows if row[0] == f"rank {rank}"]
        assert threads[:2] == [["steps", 1], ["phases", 0]]
        assert threads[2:]
        assert {tuple(thread) for thread in threads[2:]} == {("transfers", 0)}


def test_ranks_share_one_clock(query: Query, run: Path) -> None:
    """No rank ends a synchronous step before every rank has begun it."""
    rows = query(
        f"select slice.name, count(*), max(slice.ts), min(slice.ts + slice.dur) {SLICES}"
        " where thread.name = 'steps' group by 1"
    )
    assert sorted(row[:2] for row in rows) == [[f"step {number}", 2] for number in range(4, 8)]
    for _, _, last_begin, first_end in rows:
        assert last_begin < first_end
    first = min(trace["began_seconds"] for trace in traces(run))
    for rank, trace in enumerate(traces(run)):
        ((begin,),) = query(f"select min(slice.ts) {SLICES} where process.name = 'rank {rank}'")
        assert begin == pytest.approx((trace["began_seconds"] - first) * 1e9, abs=1)


def test_details_of_events_are_read(query: Query, run: Path) -> None:
    ((imported,),) = query(
        "select sum(int_value) from slice join args using (arg_set_id)"
        " where category = 'transfer' and key = 'args.bytes'"
    )
    events = [event for trace in traces(run) for event in trace["traceEvents"]]
    transfers = [event for event in events if event.get("cat") == "transfer"]
    assert imported == sum(event["args"]["bytes"] for event in transfers) > 0
