"""Planted cases: what was put into the records is what the verdict says, in words and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.analysis.collection import collect
from paceline.analysis.phases import explain
from paceline.analysis.run import open_run
from paceline.analysis.run_group import NOT_RUN, RunGroup
from paceline.analysis.verdict import Verdict, make_verdict
from paceline.report.wording.findings import findings
from paceline.report.wording.headline import headline
from paceline.report.wording.recommendations import next_steps
from tests.support.records import FakeRun, write_repeats, write_run

COMPUTE = {"forward": 0.010, "backward": 0.008}


def judged(folder: Path) -> Verdict:
    return make_verdict(collect(folder).groups)


def texts(verdict: Verdict, subject: str) -> list[str]:
    return [point.text for point in findings(verdict) if point.subject == subject]


def two_workers(exchange: float) -> list[dict[str, float]]:
    return [{**COMPUTE, "exchange": exchange}] * 2


def test_a_known_winner_is_named_with_its_lead_and_the_phase_behind_it(tmp_path: Path) -> None:
    """20 ms against 25 ms: 20% less. Repeats spread by 1% make an interval of a few per cent."""
    spread = (0.99, 1.0, 1.01)
    quick = FakeRun("a", {"strategy": "overlap"}, two_workers(0.002))
    slow = FakeRun("b", {"strategy": "gather_scatter"}, two_workers(0.007))
    write_repeats(tmp_path, quick, spread)
    write_repeats(tmp_path, slow, spread)
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("overlap is fastest: 20.00 ms per iteration, 20.0% less")
    assert "than gather_scatter" in headline(verdict)
    assert verdict.lead is not None
    # By hand: sd of the means 0.2 and 0.25 ms, so the difference of 5 ms has a standard error of
    # sqrt((0.2**2 + 0.25**2) / 3) = 0.185 ms, and t of 3.8 degrees is 2.84: 5 -+ 0.525 ms of 25.
    assert verdict.lead.low == pytest.approx(4.475 / 25, rel=0.01)
    assert verdict.lead.high == pytest.approx(5.525 / 25, rel=0.01)
    assert "95% CI 17.9% to 22.1%" in headline(verdict)
    (why,) = texts(verdict, "Why")
    assert "mostly in exchange (+5.00 ms)" in why, "without the first iteration"
    assert "over 3 repeats" in texts(verdict, "Confidence")[0]


def test_a_difference_within_the_spread_of_repeats_is_called_noise(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}), (0.9, 1.0, 1.1))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}), (0.91, 1.01, 1.12))
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("No clear winner")
    assert "within noise" in headline(verdict)
    assert [tie.group.label for tie in verdict.ties] == ["lr 0.02"]
    assert not texts(verdict, "Why"), "noise has no reason"
    assert any("lr 0.01 and lr 0.02" in step for step in next_steps(verdict))


def test_with_one_repeat_the_spread_between_runs_is_said_to_be_unknown(tmp_path: Path) -> None:
    noise = (0.0, 0.001, -0.001, 0.0005)
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, noise=noise))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.02, "backward": 0.02}],
                                noise=noise))  # fmt: skip
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("lr 0.01 was fastest: ")
    assert "(single run, significance unknown)" in headline(verdict)
    assert "probably too narrow" in texts(verdict, "Confidence")[0]
    assert any("Repeat each configuration" in step for step in next_steps(verdict))


def test_a_straggler_is_named_with_what_the_others_wait(tmp_path: Path) -> None:
    """Rank 2 computes 40 ms, the others 18 ms and wait 22 ms: 55% of their 40 ms."""
    fast = {**COMPUTE, "wait": 0.022}
    write_run(tmp_path, FakeRun("a", {}, [fast, fast, {"forward": 0.022, "backward": 0.018}]))
    verdict = judged(tmp_path)
    (output,) = texts(verdict, "Straggler")
    assert "worker 2 on node 0 computes" in output
    assert "55.0% of their time" in output
    assert any("--shares auto" in step and "2.2 times" in step for step in next_steps(verdict))


def test_workers_that_are_alike_have_no_straggler(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {}, [{**COMPUTE, "wait": 0.001}] * 3))
    assert judged(tmp_path).stragglers == []


def test_who_is_waited_for_longer_than_it_computes_is_no_straggler(tmp_path: Path) -> None:
    """Rank 0 serves the others and computes 2 ms longer, but they wait 10 ms."""
    first = {"forward": 0.012, "backward": 0.008, "exchange": 0.010}
    write_run(tmp_path, FakeRun("a", {}, [first, {**COMPUTE, "wait": 0.010}]))
    assert judged(tmp_path).stragglers == []


@pytest.mark.parametrize(
    ("nodes", "subject", "other"),
    [(1, "Communication-bound", "Network-bound"), (2, "Network-bound", "Communication-bound")],
)
def test_mostly_communication_is_network_bound_only_across_machines(
    nodes: int, subject: str, other: str, tmp_path: Path
) -> None:
    """18 ms of computing beside 54 ms of exchange: 75%."""
    settings = {"strategy": "allreduce", "nnodes": nodes, "nproc_per_node": 2 // nodes}
    write_run(tmp_path, FakeRun("a", settings, two_workers(0.054), nodes=nodes))
    verdict = judged(tmp_path)
    (output,) = texts(verdict, subject)
    assert texts(verdict, other) == []
    assert "75.0% exposed communication" in output
    assert any("--strategy overlap" in step for step in next_steps(verdict))


def test_mostly_computing_is_compute_bound(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {}, two_workers(0.002)))
    verdict = judged(tmp_path)
    (output,) = texts(verdict, "Compute-bound")
    assert "50.0% forward, 40.0% backward" in output
    assert any(
        "4 workers" in step and "speedup of at most 1.82x" in step for step in next_steps(verdict)
    )


@pytest.mark.parametrize("status", ["failed", "diverged", "stopped", "unfinished"])
def test_a_cell_that_did_not_finish_is_named_and_not_ranked(status: str, tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}))
    write_run(
        tmp_path,
        FakeRun(
            "b",
            {"lr": 9.0},
            [{"forward": 0.001}],
            status=status,
            cause=None if status == "unfinished" else "the cable was cut",
        ),
    )
    verdict = judged(tmp_path)
    (output,) = texts(verdict, "Not finished")
    cause = "no result.json" if status == "unfinished" else "the cable was cut"
    assert output.startswith(f"lr 9: {status}: ")
    assert cause in output
    assert headline(verdict).startswith("lr 0.01: ")


def test_where_nothing_finished_that_is_the_verdict(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", status="failed", cause="out of memory"))
    assert headline(judged(tmp_path)) == "The run did not finish: out of memory."


def test_iterations_of_different_batches_are_held_against_each_other_by_samples(
    tmp_path: Path,
) -> None:
    """The larger batch takes longer for an iteration and less for a sample."""
    write_run(tmp_path, FakeRun("a", {"batch_size": 32}, [{"forward": 0.01}]))
    large = FakeRun("b", {"batch_size": 128}, [{"forward": 0.02}])
    large.more = {"samples": 128 * large.iterations}
    write_run(tmp_path, large)
    verdict = judged(tmp_path)
    # 0.02 s for 128 samples are 156.25 ms for 1,000.
    assert "batch 128 was fastest: 156.25 ms per 1,000 samples" in headline(verdict)


def test_who_cannot_be_told_from_the_fastest_is_named_wherever_it_ranks(tmp_path: Path) -> None:
    """The third and last varies so much that it may be the fastest."""
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}), (1.0, 1.01, 1.02))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}), (1.2, 1.21, 1.22))
    write_repeats(tmp_path, FakeRun("c", {"lr": 0.03}), (0.7, 1.3, 1.9))
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("lr 0.01 is fastest")
    assert texts(verdict, "Tied with the fastest") == ["lr 0.03."]
    assert texts(verdict, "Slowest") == []


def test_intervals_over_stretches_are_not_passed_off_as_over_repeats(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}), (1.0, 1.01, 1.02))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}), (1.2, 1.21, 1.22))
    write_run(tmp_path, FakeRun("c", {"lr": 0.03}, [{"forward": 0.05}]))
    (output,) = texts(judged(tmp_path), "Confidence")
    assert output.startswith(
        "intervals are over 3 repeats of each configuration (Welch's t), corrected for 3"
    )


def test_a_phase_that_is_less_than_half_of_a_difference_is_not_most_of_it(tmp_path: Path) -> None:
    even = {"forward": 0.014, "backward": 0.014, "exchange": 0.005, "wait": 0.004}
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, two_workers(0.0)))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [even] * 2))
    (why,) = texts(judged(tmp_path), "Why")
    assert "most of all in backward" in why


def test_waiting_that_is_more_than_communication_is_named_beside_computing(tmp_path: Path) -> None:
    """Computing 72%, waiting 20%, communication 8%."""
    write_run(tmp_path, FakeRun("a", {}, [{**COMPUTE, "wait": 0.005, "exchange": 0.002}] * 2))
    (output,) = texts(judged(tmp_path), "Compute and waiting")
    assert "20.0% waiting" in output


def test_accuracy_that_the_fastest_lost_is_told(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, [{"forward": 0.01}], accuracy=0.7))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.03}], accuracy=0.9))
    (output,) = texts(judged(tmp_path), "Accuracy")
    assert output == "the fastest reaches 0.7000, lr 0.02 reaches 0.9000, in a single run."


def test_a_target_that_was_reached_decides_who_is_fastest(tmp_path: Path) -> None:
    reach = {"target_accuracy": 0.9}
    for number, (first, second) in enumerate(((10.0, 20.0), (10.2, 20.4))):
        write_run(tmp_path, FakeRun(f"a{number}", {**reach, "lr": 0.01, "seed": number},
                                    [{"forward": 0.05}], seconds_to_target=first))  # fmt: skip
        write_run(tmp_path, FakeRun(f"b{number}", {**reach, "lr": 0.02, "seed": number},
                                    [{"forward": 0.01}], seconds_to_target=second))  # fmt: skip
    assert headline(judged(tmp_path)).startswith("lr 0.01 is fastest: 10.1 s to the target")


def test_times_to_different_targets_are_not_compared(tmp_path: Path) -> None:
    for name, target, seconds in (("a", 0.8, 1.0), ("b", 0.9, 2.0)):
        write_run(tmp_path, FakeRun(name, {"target_accuracy": target}, seconds_to_target=seconds))
    assert "to the target" not in headline(judged(tmp_path))


def test_an_accuracy_and_a_loss_are_different_targets(tmp_path: Path) -> None:
    for name, target in (("a", "target_accuracy"), ("b", "target_loss")):
        write_run(tmp_path, FakeRun(name, {target: 0.8}, seconds_to_target=1.0))
    assert "to the target" not in headline(judged(tmp_path))


def test_who_did_not_reach_the_target_is_named(tmp_path: Path) -> None:
    reach = {"target_accuracy": 0.8}
    write_run(tmp_path, FakeRun("a", {**reach, "lr": 0.01}, seconds_to_target=1.0))
    write_run(tmp_path, FakeRun("b", {**reach, "lr": 0.02}, accuracy=0.7))
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("lr 0.01: 1.00 s to the target")
    assert texts(verdict, "Target not reached") == ["lr 0.02 (0.8)."]


def test_finished_runs_without_times_are_not_called_unfinished(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", more={"workers": []}))
    (path / "events-0.jsonl").unlink()
    assert headline(judged(tmp_path)) == "No iteration of a finished run was timed."


def test_a_repeat_that_failed_is_told_before_one_that_has_not_come(tmp_path: Path) -> None:
    path = write_run(tmp_path, FakeRun("a", status="failed", cause="the cable was cut"))
    failed = RunGroup("one", [open_run(path)], NOT_RUN)
    assert texts(make_verdict([failed]), "Not finished") == ["one: failed: the cable was cut"]
    whole = open_run(write_run(tmp_path, FakeRun("b")))
    refused = RunGroup("two", [whole], "failed: no such model")
    assert texts(make_verdict([refused]), "Not finished") == ["two: a repeat failed: no such model"]


def test_what_was_not_run_is_no_reason_why_a_run_did_not_finish(tmp_path: Path) -> None:
    cut = open_run(write_run(tmp_path, FakeRun("a", status="stopped", cause="by hand")))
    groups = [RunGroup("one", [], "failed: no such model"), RunGroup("two", [cut])]
    assert headline(make_verdict(groups)) == "The run did not finish: by hand."


def test_cells_are_named_by_what_sets_them_apart(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.05}))
    write_run(tmp_path, FakeRun("b", {"lr": 0.05, "batch_size": 256}))
    write_run(tmp_path, FakeRun("c", {"lr": 0.05, "checkpoint_every": 20}))
    write_run(tmp_path, FakeRun("d", {"lr": 0.05, "strategy": "ring"}, [COMPUTE] * 2))
    labels = [group.label for group in collect(tmp_path).groups]
    assert labels == ["single", "single, batch 256", "single, checkpoint every 20",
                      "ring, 2 workers"]  # fmt: skip


def test_cells_of_different_batches_are_explained_by_samples(tmp_path: Path) -> None:
    """12 ms for 64 samples are 187.5 ms for 1,000, and 10 ms for 32 are 312.5 ms."""
    for name, batch, seconds in (("a", 64, 0.012), ("b", 32, 0.010)):
        run = FakeRun(name, {"batch_size": batch}, [{"forward": seconds}], iterations=1000)
        run.more = {"samples": batch * run.iterations}
        write_run(tmp_path, run)
    large, small = collect(tmp_path).groups
    found = explain(large, small)
    assert found is not None
    assert found.work == "per 1,000 samples"
    assert found.seconds == pytest.approx(0.125, rel=0.002)
    assert found.explained == pytest.approx(found.seconds)


def test_cells_of_another_model_are_not_compared(tmp_path: Path) -> None:
    """softmax is ten times as fast as both lenets, and no winner over them."""
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.02, "backward": 0.02}]))
    write_run(tmp_path, FakeRun("c", {"model": "softmax"}, [{"forward": 0.002}]))
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("Of lenet on digits: ")
    assert verdict.ranking is not None
    assert {ranked.group.settings.get("model") for ranked in verdict.ranking.entries} == {"lenet"}
    assert texts(verdict, "Ranked separately")[0].startswith("softmax on digits: ")


def test_models_compare_by_the_time_to_the_same_target(tmp_path: Path) -> None:
    for name, model, seconds in (("a", "lenet", 2.0), ("b", "softmax", 1.0)):
        settings = {"model": model, "target_accuracy": 0.8}
        write_run(tmp_path, FakeRun(name, settings, seconds_to_target=seconds))
    text = headline(judged(tmp_path))
    assert "fastest: 1.00 s to the target" in text
    assert "Of lenet" not in text


def test_models_are_not_compared_where_none_reached_the_target(tmp_path: Path) -> None:
    for name, model in (("a", "lenet"), ("b", "softmax")):
        write_run(tmp_path, FakeRun(name, {"model": model, "target_accuracy": 0.8}, accuracy=0.7))
    assert headline(judged(tmp_path)).startswith("Not compared")


def test_no_winner_is_named_where_no_two_cells_are_alike(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a"))
    write_run(tmp_path, FakeRun("b", {"model": "softmax"}, [{"forward": 0.002}]))
    assert headline(judged(tmp_path)).startswith("Not compared")


def test_an_interval_of_less_ends_at_all_of_the_time(tmp_path: Path) -> None:
    write_repeats(tmp_path, FakeRun("a", {"lr": 0.01}), (1.0, 2.0))
    write_repeats(tmp_path, FakeRun("b", {"lr": 0.02}), (4.0, 9.0))
    verdict = judged(tmp_path)
    assert verdict.lead is not None
    assert verdict.lead.high > 1
    assert "more to 100.0% less)" in headline(verdict)


def test_one_repeat_of_few_iterations_is_too_little_to_tell(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, iterations=12))
    write_run(
        tmp_path, FakeRun("b", {"lr": 0.02}, [{"forward": 0.02, "backward": 0.02}], iterations=12)
    )
    text = headline(judged(tmp_path))
    assert text.endswith("(single run of 12 iterations, significance unknown).")


def test_the_cause_of_a_failure_comes_before_runs_that_were_not_ended(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("a", {"lr": 0.01}, status="unfinished"))
    write_run(tmp_path, FakeRun("b", {"lr": 0.02}, status="failed", cause="the cable was cut"))
    assert "the cable was cut" in headline(judged(tmp_path))
    assert "the cable was cut" in texts(judged(tmp_path), "Not finished")[0]


def test_events_that_were_cut_short_or_lost_are_named(tmp_path: Path) -> None:
    """Of 100 iterations in blocks of 50, the second block and the end are gone."""
    whole = write_run(tmp_path, FakeRun("a", {}, [COMPUTE, COMPUTE]))
    assert collect(tmp_path).skipped == []
    events = whole / "events-0.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:2]))
    (whole / "events-1.jsonl").unlink()
    output = [(one.name, one.reason) for one in collect(tmp_path).skipped]
    assert output == [
        ("a", "events of rank 0 end at iteration 50 of 100"),
        ("a", "events of rank 1 are missing"),
    ]
    # What is left tells the pace.
    assert collect(tmp_path).groups[0].iteration_means == pytest.approx([0.018])


def test_a_line_that_is_lost_amid_events_is_named(tmp_path: Path) -> None:
    events = write_run(tmp_path, FakeRun("a", iterations=150)) / "events-0.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(lines[:2] + lines[3:]))
    (output,) = collect(tmp_path).skipped
    assert output.reason == "events of rank 0 end at iteration 50 of 150"


def cluster_run(gradient_bytes: int, exchange: float, **hardware: float) -> FakeRun:
    """Two emulated nodes with a measured link of 1 Gbit/s and a round trip of 0.1 ms."""
    got = [
        {"what": "bandwidth out", "node": 0, "asked": 1e9, "got": 1e9, "unit": "bit/s"},
        {"what": "round trip", "node": None, "asked": None, "got": 1e-4, "unit": "s"},
    ]
    return FakeRun(
        "a",
        {"strategy": "ring", "nnodes": 2, "nproc_per_node": 1, "threads": 1,
         "cluster": "nodes=2,bandwidth=1gbit"},
        two_workers(exchange),
        nodes=2,
        gradient_bytes=gradient_bytes,
        more={"cluster": {"asked": None, "got": got, "busy_cores": 0.0, "warnings": []},
              "hardware": {"cpu": "a CPU", "cores": 2, "cores_in_machine": 2, "gpus": [],
                           **hardware}},
    )  # fmt: skip


def test_communication_that_the_link_does_not_explain_is_not_network_bound(tmp_path: Path) -> None:
    """204 kB at 125 MB/s are 1.63 ms, and a message adds 0.1 ms: not the 94 ms that it took."""
    write_run(tmp_path, cluster_run(204_000, 0.094))
    verdict = judged(tmp_path)
    assert texts(verdict, "Network-bound") == []
    (output,) = texts(verdict, "Communication-bound")
    assert "204.0 kB take 1.73 ms of the 94.00 ms at the measured 125.0 MB/s" in output
    assert "scheduling or communication software, not the link" in output
    assert not any("codec" in step for step in next_steps(verdict))


def test_communication_that_the_link_explains_is_network_bound(tmp_path: Path) -> None:
    """10 MB at 125 MB/s are 80 of the 94 ms."""
    write_run(tmp_path, cluster_run(10_000_000, 0.094))
    verdict = judged(tmp_path)
    (output,) = texts(verdict, "Network-bound")
    assert "likely cause" not in output
    assert any("codec=fp16" in step for step in next_steps(verdict))


def test_many_small_messages_are_explained_by_latency_and_no_codec_helps(tmp_path: Path) -> None:
    run = cluster_run(1_000, 0.094)
    path = write_run(tmp_path, run)
    result = json.loads((path / "result.json").read_text())
    for worker in result["workers"]:
        worker["traffic"]["gradients"]["messages"] = 900 * run.iterations
    (path / "result.json").write_text(json.dumps(result))
    verdict = judged(tmp_path)
    assert len(texts(verdict, "Network-bound")) == 1
    assert not any("codec" in step for step in next_steps(verdict))


@pytest.mark.parametrize(
    ("hardware", "cause"),
    [({"cpu_quota": 0.5}, "the CPU quota of 0.5 cores"),
     ({"cores_in_machine": 1}, "CPU contention: 2 threads of the workers share 1 cores")],
)  # fmt: skip
def test_the_remaining_cause_is_taken_from_the_records(
    hardware: dict[str, float], cause: str, tmp_path: Path
) -> None:
    write_run(tmp_path, cluster_run(204_000, 0.094, **hardware))
    (output,) = texts(judged(tmp_path), "Communication-bound")
    assert cause in output


def test_a_lead_that_the_correction_takes_away_is_within_noise(tmp_path: Path) -> None:
    """0.9 against 1.0 with a deviation of 0.03 is significant alone, and not as the best of six."""
    spread = (-0.03, 0.0, 0.03)
    for number, mean in enumerate((0.9, 1.0)):
        run = FakeRun(f"c{number}", {"lr": 0.01 * (number + 1)})
        write_repeats(tmp_path, run, [mean + one for one in spread])
    assert " is fastest: " in headline(judged(tmp_path))
    for number in range(2, 6):
        run = FakeRun(f"c{number}", {"lr": 0.01 * (number + 1)})
        write_repeats(tmp_path, run, [1.0 + one for one in spread])
    verdict = judged(tmp_path)
    assert headline(verdict).startswith("No clear winner: lr 0.01")
    assert texts(verdict, "First clear difference") == []
    assert "corrected for 15 comparisons (Holm)" in texts(verdict, "Confidence")[0]


def test_a_link_that_paceline_comm_measured_is_used_as_well(tmp_path: Path) -> None:
    """Two workers of one machine send 204 kB each: 408 kB at 10 GB/s take 41 us."""
    write_run(tmp_path, FakeRun("a", {}, two_workers(0.094), gradient_bytes=204_000))
    one = {"operation": "all_reduce", "bytes": 1 << 20, "seconds": {"median": 0.001},
           "algorithm_bytes_per_second": 5e9, "bus_bytes_per_second": 5e9,
           "share_of_limit": 0.5}  # fmt: skip
    file = tmp_path / "comm.json"
    file.write_text(json.dumps({"schema": 1, "workers": 2, "measurements": [one]}))
    points = findings(make_verdict(collect(tmp_path).groups, [file]))
    (output,) = [point.text for point in points if point.subject == "Communication-bound"]
    assert "408.0 kB take 41 us of the 94.00 ms at the measured 10.0 GB/s" in output
