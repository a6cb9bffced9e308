"""Figures and tables against the records: numbers are computed here from the files themselves."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.analysis.collection import collect
from paceline.analysis.communication import (
    all_reduce_bandwidth,
    read_comm_measurements,
    run_traffic,
)
from paceline.analysis.curves import MAX_POINTS, downsample
from paceline.analysis.events import IN_ITERATION, read_evaluations
from paceline.analysis.phases import worker_breakdown
from paceline.analysis.ranking import rank_by_condition
from paceline.analysis.ranks import rank_times
from paceline.analysis.resources import node_curves
from paceline.analysis.run import open_run
from paceline.analysis.run_group import RunGroup
from paceline.analysis.trace import read_step
from paceline.analysis.tradeoffs import checkpoint_costs, summarize_batch_sizes
from paceline.records import PHASES
from paceline.report.charts.timeline import MAX_SPANS, Span, merged
from paceline.report.document import BulletList, Table
from paceline.report.sections import build_sections
from paceline.report.sections.common import section_context
from paceline.report.sections.scaling import batch_size_answer
from tests.support.marks import SVG, figure, numbers, result_of, section, series
from tests.support.records import FakeRun, write_repeats, write_run, write_trace


def test_marks_of_the_curves_carry_the_recorded_numbers(tmp_path: Path) -> None:
    run = FakeRun("a", iterations=40)
    path = write_run(tmp_path, run)
    curves = section(collect(path).groups, "curves")
    (mark,) = series(figure(curves, "curves-train-loss-iteration"))
    assert numbers(mark, "data-x") == list(range(1, 41))
    assert numbers(mark, "data-y") == pytest.approx(run.losses(), rel=1e-6)
    (mark,) = series(figure(curves, "curves-train-loss-seconds"))
    assert numbers(mark, "data-x") == pytest.approx(np.cumsum(run.seconds(0)), rel=1e-6)
    history = result_of(path)["history"]
    for axis in ("iteration", "epoch", "seconds"):
        for key in ("test_loss", "test_accuracy"):
            svg = figure(curves, f"curves-{key}-{axis}".replace("_", "-"))
            (mark,) = series(svg)
            assert numbers(mark, "data-x") == pytest.approx([one[axis] for one in history])
            assert numbers(mark, "data-y") == pytest.approx([one[key] for one in history])


def test_repeats_are_drawn_with_their_spread(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a", iterations=40), (1.0, 1.5, 2.0))
    times = section(collect(tmp_path).groups, "iteration_time")
    (mark,) = series(figure(times, "iteration-time-curve"))
    assert numbers(mark, "data-y") == pytest.approx([0.03] * 39)
    assert numbers(mark, "data-low") == pytest.approx([0.02] * 39)
    assert numbers(mark, "data-high") == pytest.approx([0.04] * 39)
    (whisker,) = figure(times, "iteration-time-means").iter(f"{SVG}path")
    assert float(whisker.attrib["data-low"]) == pytest.approx(0.02)
    assert float(whisker.attrib["data-high"]) == pytest.approx(0.04)


def test_shares_of_phases_sum_to_the_whole(tmp_path: Path) -> None:
    path = write_run(
        tmp_path, FakeRun("a", {}, [dict.fromkeys(IN_ITERATION, 0.001), {"forward": 0.006}])
    )
    svg = figure(section(collect(path).groups, "phases"), "phases-whole")
    shares = [float(one.attrib["data-value"]) for one in svg.iter(f"{SVG}rect")
              if one.attrib["class"].startswith("part")]  # fmt: skip
    # A bar for each worker.
    assert sum(shares) == pytest.approx(2.0)
    for worker in result_of(path)["workers"]:
        split = worker_breakdown(worker)
        assert split.total == pytest.approx(worker["wall_seconds"])
        assert sum(split.share(phase) for phase in PHASES) == pytest.approx(1.0)


def test_a_bar_stands_for_each_worker(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", {}, [{"forward": 0.01}, {"forward": 0.02}]))
    svg = figure(section(collect(path).groups, "phases"), "phases-workers")
    parts = [one for one in svg.iter(f"{SVG}rect") if one.attrib.get("data-kind") == "forward"]
    values = [float(one.attrib["data-value"]) for one in parts]
    assert values == pytest.approx([0.01, 0.02])


def test_times_of_rank_0_and_of_the_others_stand_apart(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", {}, [{"forward": 0.01}, {"forward": 0.02}]))
    times = rank_times(collect(path).groups[0])
    assert times.rank_0 == pytest.approx([0.01])
    assert times.others == pytest.approx([0.02])


def test_use_of_a_node_is_what_was_sampled(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, FakeRun("a")))
    use = node_curves(run, 0)
    assert use is not None
    assert use.cpu_percent.middle.tolist() == [90.0 + index for index in range(1, 10)]
    assert use.rss_bytes.middle.tolist() == [500_000_000.0] * 10
    # 1000 n^2 bytes after n half seconds: 2000 (2 n - 1) bytes a second in the n-th.
    rates = [2000.0 * (2 * index - 1) for index in range(1, 10)]
    assert use.sent_bytes_per_second.middle.tolist() == pytest.approx(rates)
    assert use.sent_bytes_per_second.x.tolist() == [0.5 * index for index in range(1, 10)]


def test_batch_sizes_are_told_with_time_loss_accuracy_memory_and_cpu(tmp_path: Path) -> None:
    for batch, memory in ((256, 700_000_000), (64, 500_000_000)):
        write_run(tmp_path, FakeRun(f"b{batch}", {"batch_size": batch}, rss_bytes=memory))
    small, large = summarize_batch_sizes(collect(tmp_path).groups)
    assert (small.batch_size, large.batch_size) == (64, 256)
    assert large.peak_memory_bytes == [700_000_001]
    assert small.cpu_percent == [95.0]
    assert small.test_accuracy == [0.9]
    assert small.wall_seconds == [result_of(tmp_path / "b64")["wall_seconds"]]


def test_checkpoints_cost_what_the_run_without_them_did_not(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("plain"))
    with_them = FakeRun(
        "with",
        {"checkpoint_every": 10},
        rss_bytes=800_000_000,
        checkpoints={"count": 10, "bytes": 5000, "blocked_seconds": 0.4},
    )
    with_them.more = {"wall_seconds": 4.0}
    write_run(tmp_path, with_them)
    (cost,) = checkpoint_costs(collect(tmp_path).groups)
    assert cost.baseline == "no checkpoints"
    assert cost.longer is not None
    assert cost.longer.amount == pytest.approx(4.0 - result_of(tmp_path / "plain")["wall_seconds"])
    assert cost.more_memory is not None
    assert cost.more_memory.amount == 300_000_000
    assert cost.blocked_seconds == [0.4]


def test_bandwidths_follow_their_formulas(tmp_path: Path) -> None:
    """4 workers sum 1 MB in 20 ms by a ring: each sends 2 x 3 / 4 of it."""
    phases = [{"forward": 0.01, "exchange": 0.02}] * 4
    run = FakeRun("a", {"strategy": "ring"}, phases, iterations=1000, gradient_bytes=1_500_000)
    run.more = {"cluster": {"got": [{"what": "bandwidth out", "node": 0, "asked": 1e9,
                                     "got": 0.96e9, "unit": "bit/s"}]}}  # fmt: skip
    rate = all_reduce_bandwidth(collect(write_run(tmp_path, run)).groups[0])
    assert rate is not None
    assert rate.bytes == pytest.approx(1_000_000)
    # The first iteration takes double, which a thousand others dilute.
    assert rate.algorithm_bandwidth == pytest.approx(50e6, rel=0.002)
    assert rate.bus_bandwidth == pytest.approx(75e6, rel=0.002)
    assert rate.reference_bandwidth == pytest.approx(100e6, rel=0.002)
    assert rate.reference_utilization == pytest.approx(3.0)
    assert rate.link_share == pytest.approx(75 / 120, rel=0.002)


@pytest.mark.parametrize(
    "settings", [{"options": {"codec": "fp16"}}, {"communicator": "hierarchical"}]
)
def test_no_bandwidth_is_told_where_the_formulas_do_not_hold(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    phases = [{"forward": 0.01, "exchange": 0.02}] * 4
    run = FakeRun("a", {"strategy": "ring", **settings}, phases, gradient_bytes=1_500_000)
    assert all_reduce_bandwidth(collect(write_run(tmp_path, run)).groups[0]) is None


def test_measurements_of_the_network_beside_the_runs_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a"))
    one = {"operation": "all_reduce", "communicator": "torch", "algorithm": "ring", "bytes": 4096,
           "seconds": {"median": 0.001}, "algorithm_bytes_per_second": 4.096e6,
           "bus_bytes_per_second": 6.144e6, "share_of_limit": 0.5}  # fmt: skip
    record = {"schema": 1, "kind": "comm", "workers": 4, "measurements": [one]}
    (tmp_path / "comm.json").write_text(json.dumps(record))
    (tmp_path / "comm-other.json").write_text('{"schema": 1, "measurements": 3}')
    assert read_comm_measurements(tmp_path / "comm-other.json") == []
    collection = collect(tmp_path)
    context = section_context("", collection.groups, collection.comm)
    (built,) = build_sections(context, ["bandwidth"])
    (table,) = [block for block in built.blocks if isinstance(block, Table)]
    assert table.rows[0][:4] == ("all_reduce, torch, ring", "4", "4.1 kB", "1.00 ms")


def test_buckets_are_shown_with_what_was_measured(tmp_path: Path) -> None:
    measurements = {"backward_seconds": 0.1, "latency_seconds": 0.001, "seconds_per_byte": 1e-8,
                    "overlapped_seconds_per_byte": 2e-8}  # fmt: skip
    for name, measured in (("a", measurements), ("b", None)):
        path = write_run(
            tmp_path,
            FakeRun(name, {"strategy": "overlap"}, [{"backward": 0.01, "exchange": 0.01}] * 2),
        )
        result = json.loads((path / "result.json").read_text())
        result["workers"][0]["buckets"] = {
            "count": 3, "bucket_mib": 4.0, "reason": "measured", "measurements": measured,
        }  # fmt: skip
        (path / "result.json").write_text(json.dumps(result))
        (built,) = build_sections(section_context("", collect(path).groups), ["bandwidth"])
        table = [block for block in built.blocks if isinstance(block, Table)][-1]
        figures = ("100.00 ms", "1.00 ms", "100.0 MB/s", "50.0 MB/s") if measured else ("-",) * 4
        assert table.rows[0][1:] == ("3", "4.2 MB", "measured", *figures)


def test_traffic_is_the_sum_over_the_workers(tmp_path: Path) -> None:
    phases = [{"forward": 0.01, "exchange": 0.02}] * 3
    run = open_run(write_run(tmp_path, FakeRun("a", {}, phases, gradient_bytes=700)))
    assert run_traffic(run)["gradients"].bytes_sent == 3 * 700 * 100
    assert run_traffic(run)["gradients"].messages == 300


def test_the_traced_step_of_median_length_is_drawn_with_what_overlaps(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a"))
    write_trace(path / "trace-0.json")
    step = read_step(path / "trace-0.json")
    assert step is not None
    assert step.iteration == 11
    assert step.seconds == pytest.approx(0.010)
    assert step.transfer_seconds == pytest.approx(0.006)
    assert step.overlapped_seconds == pytest.approx(0.003), "from 3 to 6 ms"
    other = read_step(path / "trace-0.json", 12)
    assert other is not None
    assert other.iteration == 12
    svg = figure(section(collect(path).groups, "timeline"), "timeline")
    (transfer,) = [
        one for one in svg.iter(f"{SVG}rect") if one.attrib.get("data-kind") == "gradients"
    ]
    assert float(transfer.attrib["data-begin"]) == pytest.approx(0.003)
    assert float(transfer.attrib["data-end"]) == pytest.approx(0.009)


def test_a_crowded_lane_is_drawn_with_a_bounded_number_of_spans() -> None:
    spans = [Span("gradients", 0.001 * index, 0.001 * index + 0.0005) for index in range(20_000)]
    few = merged(spans)
    assert len(few) <= MAX_SPANS
    assert few[0].begin_seconds == 0.0
    assert few[-1].end_seconds == pytest.approx(19.9995)


def test_a_long_curve_is_short_and_keeps_its_extremes() -> None:
    values = np.random.default_rng(0).normal(size=1_000_003)
    values[123_456], values[765_432] = 50.0, -50.0
    x = np.arange(len(values), dtype=np.float64)
    curve = downsample(x, values)
    assert len(curve) == MAX_POINTS
    assert curve.high.max() == 50.0
    assert curve.low.min() == -50.0
    assert curve.x[-1] == x[-1]
    begin = int(curve.x[0]) + 1
    end = int(curve.x[1]) + 1
    assert curve.middle[1] == statistics.median(values[begin:end])


def test_the_points_of_a_figure_are_bounded(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", iterations=5000, noise=(0.0, 0.001)))
    times = section(collect(path).groups, "iteration_time")
    (mark,) = series(figure(times, "iteration-time-curve"))
    assert len(numbers(mark, "data-x")) <= MAX_POINTS
    assert max(numbers(mark, "data-high")) == pytest.approx(0.021)


def test_curves_of_a_cell_are_of_the_repeats_that_finished(tmp_path: Path) -> None:
    cut = FakeRun("a", iterations=10, status="failed", cause="the cable was cut")
    runs = [open_run(write_run(tmp_path, run)) for run in (cut, FakeRun("b", iterations=40))]
    group = RunGroup("one", runs)
    (mark,) = series(figure(section([group], "curves"), "curves-train-loss-iteration"))
    assert numbers(mark, "data-x") == list(range(1, 41))
    (mark,) = series(figure(section([group], "iteration_time"), "iteration-time-curve"))
    assert numbers(mark, "data-x") == list(range(2, 41))


def test_evaluations_that_were_done_again_are_told_once(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", iterations=100)) / "events-0.jsonl"
    lines = path.read_text().splitlines()
    again = json.dumps({"event": "start", "iteration": 50, "resumed": True})
    path.write_text("\n".join([*lines, again, lines[-2]]) + "\n")
    assert [one["iteration"] for one in read_evaluations(path)] == [50, 100]


def test_a_larger_batch_is_judged_where_nothing_else_differs(tmp_path: Path) -> None:
    for batch, factors in ((64, (1.0, 1.01)), (256, (2.0, 2.02))):
        write_repeats(tmp_path, FakeRun(f"b{batch}", {"batch_size": batch}), factors)
    message = batch_size_answer(summarize_batch_sizes(collect(tmp_path).groups))
    assert "time per epoch +100.0% (corrected interval +82.1% to +117.9%)" in message
    assert "CPU 0.0% (within noise)" in message
    write_run(tmp_path, FakeRun("other", {"batch_size": 512, "model": "softmax"}))
    assert batch_size_answer(summarize_batch_sizes(collect(tmp_path).groups)) == ""


def test_ways_within_noise_have_no_reason(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}), (0.9, 1.0, 1.1))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}), (0.91, 1.01, 1.12))
    groups = [
        dataclasses.replace(group, axes={"machines": "equal", "rate": group.label})
        for group in collect(tmp_path).groups
    ]
    (items,) = [one for one in section(groups, "winners").blocks if isinstance(one, BulletList)]
    assert "within noise" in items.items[0][1]
    assert "more per iteration" not in items.items[0][1]


def test_only_groups_that_differ_in_the_same_axis_are_ranked_by_condition(tmp_path: Path) -> None:
    """A study with three axes includes two groups that lack the last of them."""
    axes: list[dict[str, str]] = [
        {"batch_size": "32", "cluster.nodes": "2", "strategy": "ddp"},
        {"batch_size": "32", "cluster.nodes": "2", "strategy": "overlap"},
        {"batch_size": "32", "cluster.nodes": "1"},
    ]
    for number in range(3):
        write_run(tmp_path, FakeRun(f"run{number}", {"lr": 0.01 * (number + 1)}))
    groups = [
        dataclasses.replace(group, axes=own)
        for group, own in zip(collect(tmp_path).groups, axes, strict=True)
    ]
    (ranked,) = rank_by_condition(groups)
    assert ranked.condition == "batch size 32, nodes 2"
    assert {one.group.label for one in ranked.ranking.entries} == {"ddp", "overlap"}
