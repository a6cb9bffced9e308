"""Pages of the studies that come with paceline: what the experiments showed is there, and right.

The runs never were; their files agree with one another as a run's do. What a page shows is computed
here a second time, from these files.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from paceline import formatting
from paceline.analysis.collection import collect
from paceline.analysis.phases import explain
from paceline.config import RunConfig
from paceline.data.sampling import GlobalBatchSampler
from paceline.report.build import to_document
from paceline.report.document import (
    BulletList,
    Figure,
    Table,
)
from paceline.report.markdown import to_markdown
from paceline.study.folder import Cell
from tests.support.marks import numbers
from tests.support.records import FakeRun, write_trace
from tests.support.study_page import in_seconds, mean_iteration, numeral, page_of, wall

RECORDED = Path(__file__).parent / "recorded" / "four-ways"
TOLERANCE = 0.006
"""Tables show three digits or more."""
BUSY = ("input", "forward", "backward", "update", "exchange", "wait")

WANTED: dict[str, dict[str, str]] = {
    "first-look": {
        "first-look": "Time per iteration against iteration; One iteration by phase; kind;"
        " One iteration: phases, and transfers below them",
    },
    "street-numbers": {
        "baseline": "CPU against time; Memory against time; CPU, mean; memory, mean; wall time",
        "checkpoints": "time against none; memory against none; wall time; Memory against time",
        "batch-size": "time; CPU, mean; peak memory; Test loss against epoch;"
        " Test accuracy against epoch",
        "nodes": "wall time; One iteration by phase; Speedup against workers, strong scaling;"
        " CPU against time; Memory against time; explained",
        "processes": "wall time; One iteration by phase; speedup",
        "servers": "condition; choice; relative to fastest; One iteration by phase",
    },
    "street-race": dict.fromkeys(
        ("reference-model", "own-model"),
        "Training time to the target accuracy; time to target; epoch; rank;"
        " validation loss; validation accuracy; learning rate; wall time",
    ),
    "four-ways": {
        "ways": "rank 0; other ranks; first; compute; communication; overlapped communication;"
        " Training loss against iteration; Time per iteration against iteration; test accuracy;"
        " One iteration: phases, and transfers below them; explained",
        "scaling": "Speedup against workers, strong scaling; efficiency; rank 0; other ranks",
    },
    "parameter-server": {
        "regression": "Training loss against epoch; Test loss against epoch;"
        " Test accuracy against epoch; converged after epoch",
        "nodes": "training time; CPU, mean; memory, mean; network sent; test accuracy;"
        " node 0 / mean of the other nodes",
        "softmax-batch": "time; test loss; test accuracy; peak memory; CPU, mean",
        "cnn-batch": "time; test loss; test accuracy; peak memory; CPU, mean",
    },
    "gpu-scaling": {
        "batch": "time per epoch; first epoch",
        "weak": "time per epoch; speedup; efficiency; communication per epoch; kind; messages;"
        " Speedup against workers, weak scaling; Efficiency against workers, weak scaling",
        "strong": "time per epoch; speedup; efficiency; Speedup against workers, strong scaling",
        "link": "algorithm bandwidth; bus bandwidth; reference bandwidth; reference utilization;"
        " bus bandwidth / link",
        "large-batch": "Final test accuracy; below the best; Test accuracy against epoch",
        "batch-norm": "final accuracy; messages",
        "order": "first 8 samples; Test accuracy against epoch",
        "balance": "compute balance; samples; waiting",
    },
    "transformer-ways": dict.fromkeys(
        ("small-host", "large-host", "small-nodes", "large-nodes"),
        "step; compute; exposed comm.; sent; memory; loss; kind; speedup; Time of a step;"
        " One iteration: phases, and transfers below them",
    ),
}
"""Titles of figures and headings of tables that each part of each study has, after `;`."""


@pytest.mark.parametrize("name", list(WANTED))
def test_a_page_has_what_its_experiment_showed(name: str, tmp_path: Path) -> None:
    def traced(run: FakeRun, cell: Cell, config: RunConfig) -> None:
        run.seconds_to_target = 1.0 if config.target_accuracy else None
        if config.checkpoint_every != "never":
            run.checkpoints = {"count": 2, "bytes": 10, "blocked_seconds": 0.1}

    page = page_of(name, tmp_path, traced)
    for cell in page.study.cells:
        if cell.settings.get("trace"):
            write_trace(page.folder.run_folder(cell).path / "trace-0.json")
    page.document = to_document(collect(page.folder.path))
    missing = []
    for part, wanted in WANTED[name].items():
        there: set[str] = set()
        for block in page.blocks(part):
            if isinstance(block, Figure):
                there.add(block.title)
            elif isinstance(block, Table):
                there |= {*block.columns}
        missing += [f"{part}: {one}" for one in wanted.split("; ") if one not in there]
    assert missing == []
    assert {part.name for part in page.study.parts} == set(WANTED[name])


def plant_street_numbers(run: FakeRun, cell: Cell, config: RunConfig) -> None:
    if config.checkpoint_every != "never":
        run.checkpoints = {"count": 4, "bytes": 4000, "blocked_seconds": 0.2}
        run.rss_bytes, run.more = 600_000_000, {"wall_seconds": 8.0}
    if config.global_batch_size == 256:
        run.rss_bytes = 900_000_000
    if cell.part == "servers":
        slow = cell.axes["machines"] != "equal"
        fast = "asynchronous server" if slow else "all-reduce"
        spent = 0.001 if cell.axes["strategy"] == fast else 0.030
        run.phases = [{"forward": 0.01, "exchange": spent}] * 3


def test_street_numbers_tells_what_the_records_hold(tmp_path: Path) -> None:
    page = page_of("street-numbers", tmp_path, plant_street_numbers)
    baseline = page.study.cells_of("baseline")[0]
    sampled = [
        json.loads(line)
        for line in page.folder.run_folder(baseline).resources_file(0).read_text().splitlines()
    ]
    (mark,) = page.marks("baseline", "Memory against time", "series")
    assert numbers(mark, "data-y") == [one["rss_bytes"] for one in sampled]
    (mark,) = page.marks("baseline", "CPU against time", "series")
    assert numbers(mark, "data-y") == [one["cpu_percent"] for one in sampled[1:]]

    results = page.results("checkpoints")
    plain, each = results["none"], results["each epoch"]
    row = next(one for one in page.table("checkpoints", "time against none")
               if one[""] == "each epoch")  # fmt: skip
    assert row["wall time"] == "8.00 s"
    assert in_seconds(row["time against none"]) == pytest.approx(
        each["wall_seconds"] - plain["wall_seconds"], rel=TOLERANCE
    )
    assert row["memory against none"] == "+100.0 MB (+20.0%)"
    assert "memory +100.0 MB (+20.0%)" in page.answers("checkpoints")[0]

    rows = page.table("batch-size", "peak memory")
    assert [row["batch"] for row in rows] == ["32", "64", "256"]
    for row, result in zip(rows, page.results("batch-size").values(), strict=True):
        assert row["time"] == wall(result)
        assert row["peak memory"] == formatting.size(result["nodes"][0]["rss_bytes_peak"])

    for row, (label, result) in zip(
        page.table("nodes", "wall time"), page.results("nodes").items(), strict=True
    ):
        assert (row[""], row["wall time"]) == (label, wall(result))
    assert len(page.marks("nodes", "CPU against time", "series")) == 1 + 2 + 3

    answer = page.answers("servers")[0]
    assert answer.startswith(
        "all-reduce is the fastest exact choice in every case (equal; one at half speed)."
    )
    assert "Fastest approximate (can change the result): " in answer
    assert "one at half speed: asynchronous server" in answer


def test_street_race_tells_what_the_records_hold(tmp_path: Path) -> None:
    def plant(run: FakeRun, cell: Cell, config: RunConfig) -> None:
        run.accuracy = 0.95
        run.seconds_to_target = 2.0 if config.workers == 3 else 3.0 + config.lr

    page = page_of("street-race", tmp_path, plant)
    results = page.results("reference-model")
    for row in page.table("reference-model", "time to target"):
        assert row["time to target"] == formatting.seconds(results[row[""]]["seconds_to_target"])
    assert "peer to peer" in page.document.headline
    text, context = to_markdown(page.document).replace("\\", ""), page.document.chapters[0].context
    assert context.startswith("Original experiment")
    assert context in text
    assert "reference recipe, peer to peer took 100 iterations to the target of" in text
    entry = next(iter(results.values()))["history"][-1]
    row = page.table("reference-model", "validation loss")[-1]
    assert (row["epoch"], row["rank"]) == ("2.00", "0")
    assert float(row["validation loss"]) == entry["test_loss"]
    assert float(row["validation accuracy"]) == entry["test_accuracy"]
    assert row["wall time"] == formatting.seconds(2.0 + entry["seconds"])


def plant_four_ways(run: FakeRun, cell: Cell, config: RunConfig) -> None:
    """The first root has more to send than the others, who wait for it."""
    if config.strategy == "gather_scatter":
        first, *others = run.phases
        run.phases = [{**first, "exchange": 0.020}, *({**one, "wait": 0.014} for one in others)]


def test_four_ways_tells_what_the_records_hold(tmp_path: Path) -> None:
    page = page_of("four-ways", tmp_path, plant_four_ways)
    results = page.results("ways")
    for row in page.table("ways", "rank 0"):
        first, *others = (one["iteration_seconds"]["mean"] for one in results[row[""]]["workers"])
        assert row["rank 0"] == formatting.seconds(first)
        if others:
            assert row["other ranks"].split(" (")[0] == formatting.seconds(statistics.fmean(others))
    for row in page.table("ways", "overlapped communication"):
        shares = {key: statistics.fmean(one["phases"][key] for one in results[row[""]]["workers"])
                  for key in BUSY}  # fmt: skip
        whole = sum(shares.values())
        compute = shares["input"] + shares["forward"] + shares["backward"] + shares["update"]
        assert row["compute"] == formatting.share(compute / whole)
        assert row["communication"] == formatting.share(shares["exchange"] / whole)
    marks = page.marks("ways", "Time per iteration against iteration", "series")
    assert len(marks) == len(results)
    for mark, result in zip(marks, results.values(), strict=True):
        assert numbers(mark, "data-y") == pytest.approx([mean_iteration(result)] * 99, rel=1e-5)
    marks = page.marks("ways", "Training loss against iteration", "series")
    assert len(marks) == len(results)
    reasons = [one for block in page.blocks("ways") if isinstance(block, BulletList)
               for one in block.items]  # fmt: skip
    (why,) = [text for lead, text in reasons if lead == "gather + scatter:"]
    assert "more in exchange" in why
    assert "less in wait" in why


def test_the_phases_of_four_ways_explain_its_times(tmp_path: Path) -> None:
    page = page_of("four-ways", tmp_path, plant_four_ways)
    results = page.results("ways")

    def spent(result: dict[str, Any], phases: tuple[str, ...]) -> float:
        workers = result["workers"]
        total = sum(one["after_first"]["phases"][phase] for one in workers for phase in phases)
        return float(total / len(workers) / (result["iterations"] - 1))

    fastest = min(results.values(), key=mean_iteration)
    rows = page.table("ways", "explained")
    assert len(rows) == len(results) - 1
    for row in rows:
        own = results[row[""]]
        gap = mean_iteration(own) - mean_iteration(fastest)
        assert in_seconds(row["longer by"]) == pytest.approx(gap, rel=TOLERANCE)
        for phase in ("forward", "exchange", "wait"):
            more = spent(own, (phase,)) - spent(fastest, (phase,))
            assert in_seconds(row[phase]) == pytest.approx(more, rel=TOLERANCE, abs=1e-6)
        assert spent(own, BUSY) - spent(fastest, BUSY) == pytest.approx(gap, rel=0.05)
        assert 95 <= numeral(row["explained"]) <= 105


def test_recorded_phases_explain_recorded_times() -> None:
    """Runs of the quick scale on a machine of two cores, as an older version recorded them.

    The first block of their events holds the first iteration alone.
    """

    def mean_seconds(folder: Path) -> float:
        """Without the first iteration of each worker."""
        means = []
        for file in sorted(folder.glob("events-*.jsonl")):
            events = [json.loads(line) for line in file.read_text().splitlines()]
            blocks = [one["seconds"] for one in events if one["event"] == "iterations"]
            assert len(blocks[0]) == 1
            means.append(statistics.fmean(value for block in blocks[1:] for value in block))
        return statistics.fmean(means)

    cells = {cell.runs[0].id: cell for cell in collect(RECORDED).groups}
    times = {name: mean_seconds(RECORDED / name) for name in cells}
    assert len(times) == 5
    fastest = min(times, key=lambda name: times[name])
    for name in times.keys() - {fastest}:
        found = explain(cells[fastest], cells[name])
        assert found is not None
        gap = times[name] - times[fastest]
        assert found.seconds == pytest.approx(gap)
        # That version counted agreements between iterations as exchange.
        assert found.explained == pytest.approx(gap, abs=0.005 * times[name])


def test_parameter_server_tells_what_the_records_hold(tmp_path: Path) -> None:
    page = page_of("parameter-server", tmp_path)
    results = page.results("nodes")
    trained = {
        f"{label}: rank {one['rank']}, node {one['node']}": one["iteration_seconds"]
        for label, result in results.items()
        for one in result["workers"]
        if len(result["workers"]) > 1
    }
    rows = page.table("nodes", "training time")
    assert {row[""] for row in rows} == set(trained)
    for row in rows:
        spent = trained[row[""]]
        whole = 99 * spent["mean"] + spent["first"]
        assert in_seconds(row["training time"]) == pytest.approx(whole, rel=TOLERANCE)
    for row in page.table("nodes", "node 0 / mean of the other nodes"):
        # Node n uses n + 1 times the CPU of node 0, and as much memory.
        others = [node + 1 for node in range(1, len(results[row[""]]["nodes"]))]
        assert row["CPU"] == f"{1 / statistics.fmean(others):.2f}"
        assert row["memory"] == "1.00"
    for part, largest in (("softmax-batch", "4,096"), ("cnn-batch", "2,048")):
        rows = page.table(part, "peak memory")
        assert [row["batch"] for row in rows] == ["128", "256", "512", "1,024", largest]
        for row, result in zip(rows, page.results(part).values(), strict=True):
            assert row["time"] == wall(result)
            assert float(row["test accuracy"]) == result["final"]["test_accuracy"]
            assert row["CPU, mean"] == formatting.percent(result["nodes"][0]["cpu_percent_mean"])
    (mark,) = page.marks("regression", "Test loss against epoch", "series")
    history = page.results("regression").popitem()[1]["history"]
    assert numbers(mark, "data-x") == [one["epoch"] for one in history]
    assert numbers(mark, "data-y") == [one["test_loss"] for one in history]


def plant_gpu_scaling(run: FakeRun, cell: Cell, config: RunConfig) -> None:
    if config.cluster:
        run.more = {"cluster": {"got": [{"what": "bandwidth out", "node": 0, "asked": 1e9,
                                         "got": 0.8e9, "unit": "bit/s"}]}}  # fmt: skip
    if config.slow:
        run.phases = [{"forward": 0.010, "wait": 0.010}, {"forward": 0.020}]
    if config.shares:
        run.phases, run.shares = [{"forward": 0.013}, {"forward": 0.013}], (43, 21)
    run.accuracy = {"none": 0.3, "small batch": 0.9}.get(cell.axes.get("remedy", ""), 0.6)


def test_gpu_scaling_tells_what_the_records_hold(tmp_path: Path) -> None:
    page = page_of("gpu-scaling", tmp_path, plant_gpu_scaling)
    for row, result in zip(
        page.table("batch", "first epoch"), page.results("batch").values(), strict=True
    ):
        # 50 iterations make an epoch, and the first ends with the first evaluation.
        assert row["time per epoch"] == formatting.seconds(50 * mean_iteration(result))
        assert row["first epoch"] == formatting.seconds(result["history"][0]["seconds"])

    # Two workers of batch 8 make the batch of one worker with 16, which is beside the point here.
    assert "batch 16 per worker" in page.answers("weak")[0]
    one, two = page.results("strong").values()
    _, row = page.table("strong", "speedup")
    rate = [one["samples"] / 100 / mean_iteration(one), two["samples"] / 100 / mean_iteration(two)]
    assert row["speedup"] == f"{rate[1] / rate[0]:.2f}"
    assert row["efficiency"] == formatting.share(rate[1] / rate[0] / 2)
    later = [worker["after_first"]["phases"]["exchange"] for worker in two["workers"]]
    assert row["communication per epoch"] == formatting.seconds(statistics.fmean(later) / 99 * 50)

    # Four workers that send 1.5 MB each summed 1 MB.
    four = page.table("link", "bus bandwidth / link")[-1]
    seconds = page.results("link")[four[""]]["workers"][0]["phases"]["exchange"] / 100
    assert four["algorithm bandwidth"] == formatting.rate(1e6 / seconds)
    assert four["bus bandwidth"] == formatting.rate(1e6 / seconds * 2 * 3 / 4)
    assert four["reference bandwidth"] == formatting.rate(1e6 / seconds * 2)
    assert four["bus bandwidth / link"] == formatting.share(1e6 / seconds * 1.5 / 1e8)

    assert page.answers("large-batch")[0].startswith(
        "small batch is most accurate: test accuracy 0.90"
    )
    assert page.answers("large-batch")[0].endswith("lowest none: 0.3000.")

    order = GlobalBatchSampler(1024, 64, 0)
    rows = page.table("order", "first 8 samples")
    shown = {(row[""], row["epoch"]): row["first 8 samples"] for row in rows}
    for epoch in (1, 2):
        anew = ", ".join(map(str, order.permutation(epoch - 1)[:8].tolist()))
        assert shown["new order per epoch", str(epoch)] == anew
        assert shown["same order", str(epoch)] == shown["new order per epoch", "1"]

    weak = page.results("weak")
    for row in page.table("weak", "messages"):
        count = [one["traffic"][row["kind"]] for one in weak[row[""]]["workers"]]
        assert row["messages"] == formatting.count(sum(one["messages"] for one in count))
        assert row["total bytes"] == formatting.size(sum(one["bytes_sent"] for one in count))

    balance = {row[""]: row for row in page.table("balance", "compute balance")}
    assert balance["one slow"]["compute balance"] == "75.0%"
    assert balance["one slow, shares by speed"]["compute balance"] == "100.0%"
    samples = [
        (row["samples"], row["share of samples"]) for row in page.table("balance", "samples")
    ]
    assert samples[-2:] == [("4,300", "67.2%"), ("2,100", "32.8%")]
