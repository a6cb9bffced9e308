"""Plans for workers in other places than the runs: on fewer, more and other hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.plan.calibration import CollectiveTiming, MeasuredRun
from paceline.plan.collective_times import Place
from paceline.plan.comm_records import comm_timings
from paceline.plan.host_levels import levels_of
from paceline.plan.links import Link
from paceline.plan.prediction import Predictor
from paceline.plan.run_calibration import calibrate
from paceline.plan.target import Target, backend_on
from paceline.records import write_json
from tests.plan.test_run_calibration import CLUSTER, comm_record, write
from tests.support.calibrations import LINK, calibration, point, timing


@pytest.fixture
def real_hosts(tmp_path: Path) -> Path:
    """Two hosts with two workers each, without an emulated cluster."""
    root = tmp_path / "real"
    write(root, "one-16", 1, 16, cluster=None)
    write(root, "one-64", 1, 64, cluster=None)
    write(root, "four", 4, 64, strategy="ring", cluster=None, nnodes=2, nproc_per_node=2)
    record = json.loads(comm_record(root / "comm.json").read_text())
    record["cluster"] = None
    write_json(root / "comm.json", record)
    return root


def planned(root: Path, out: Path, *more: str) -> list[dict[str, Any]]:
    arguments = ["--strategy=ring", f"--json={out / 'plan.json'}", *more]
    assert main(["plan", str(root), *arguments]) == 0
    found: list[dict[str, Any]] = json.loads((out / "plan.json").read_text())["predictions"]
    return found


def test_plans_have_as_many_workers_per_host_as_the_runs(real_hosts: Path, tmp_path: Path) -> None:
    def hosts(*more: str) -> list[int]:
        return [each["hosts"] for each in planned(real_hosts, tmp_path, *more)]

    assert hosts("--workers=4,6,8") == [2, 3, 4]
    # What two workers of one host exchange was not measured.
    assert hosts("--workers=2,4") == [2, 2]
    write(real_hosts, "eight", 8, 64, strategy="ring", cluster=None, nnodes=2, nproc_per_node=4)
    (real_hosts / "four" / "result.json").unlink()
    assert hosts("--workers=2,3,4,8") == [2, 3, 2, 2]
    assert hosts("--workers=4,8", "--hosts=2") == [2, 2]
    assert hosts("--workers=4,8", "--link=10gbit") == [4, 8]


def test_workers_that_do_not_fill_hosts_equally_are_named(
    real_hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [each["workers"] for each in planned(real_hosts, tmp_path, "--workers=4,5")] == [4]
    assert "5 workers cannot share 3 hosts equally" in capsys.readouterr().out


def test_workers_are_where_the_runs_had_as_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two hosts with a worker each, and with two."""
    root = tmp_path / "runs"
    for batch in (16, 64):
        write(root, f"one-{batch}", 1, batch)
    write(root, "two", 2, 64, strategy="ring")
    settings: dict[str, Any] = {"nnodes": 2, "nproc_per_node": 2, "cluster": CLUSTER.format(2)}
    write(root, "four", 4, 64, strategy="ring", **settings)
    for nodes in (1, 2):
        comm_record(root / f"comm-{nodes}.json", nodes=nodes)
    found = planned(root, tmp_path, "--workers=2,4,8")
    assert [each["hosts"] for each in found] == [2, 2, 4]
    printed = capsys.readouterr().out
    assert "lenet, batch 64, 1 worker per host, link 1gbit,200us\n" in printed
    assert "lenet, batch 64, 2 workers per host, link 1gbit,200us\n" in printed
    write(
        root,
        "eight",
        8,
        64,
        strategy="ring",
        **{**settings, "cluster": CLUSTER.format(1), "nnodes": 1, "nproc_per_node": 8},
    )
    found = planned(root, tmp_path, "--workers=2,4,8")
    assert [each["hosts"] for each in found] == [2, 2, 1]


def test_one_host_of_several_workers_belongs_to_hosts_with_as_many(
    real_hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comm = comm_record(real_hosts / "comm-host.json", nodes=1)
    write_json(comm, {**json.loads(comm.read_text()), "cluster": None})
    assert [each["hosts"] for each in planned(real_hosts, tmp_path, "--workers=2,4")] == [1, 2]
    assert "lenet, batch 64, 2 workers per host" in capsys.readouterr().out


def test_runs_of_shared_weights_are_reproduced(tmp_path: Path) -> None:
    """They communicate in shared memory, whatever exchanges the tensors of other strategies."""
    root = tmp_path / "runs"
    settings: dict[str, Any] = {"cluster": None, "nnodes": 1, "nproc_per_node": 2}
    for batch in (16, 64):
        write(root, f"one-{batch}", 1, batch, cluster=None)
    write(root, "two", 2, 64, strategy="shared", **settings)
    record = json.loads(comm_record(root / "comm.json", nodes=1).read_text())
    gloo = record["measurements"]
    own = [{**each, "communicator": "shm"} for each in gloo]
    write_json(root / "comm.json", {**record, "cluster": None, "measurements": [*gloo, *own]})
    (run,) = calibrate([str(root)]).runs
    assert run.backend == "shm"
    (shared, ring) = planned(root, tmp_path, "--workers=2", "--strategy=shared,ring")
    # 42 ms of compute, of which each worker does half of the update, and 50 ms of exchange.
    assert shared["step_seconds"]["median"] == pytest.approx(0.042 - 0.0021 + 0.05, rel=0.005)
    # A ring is not corrected by what shared weights take longer.
    assert ring["step_seconds"]["median"] == pytest.approx(0.042 + 0.045, rel=0.02)


def test_numbers_of_hosts_share_a_table_and_curves(
    real_hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    planned(real_hosts, tmp_path, "--workers=1,4,6,8", f"--html={page}")
    printed = capsys.readouterr().out
    assert printed.count("step, 80% interval") == 1
    assert "lenet, batch 64, 2 workers per host" in printed
    assert page.read_text().count('-throughput"') == 1
    planned(real_hosts, tmp_path, "--workers=1,4,8", "--hosts=2")
    assert "lenet, batch 64, 2 hosts" in capsys.readouterr().out


def test_the_link_of_real_hosts_is_that_of_comm_records(real_hosts: Path) -> None:
    (run,) = calibrate([str(real_hosts)]).runs
    assert (run.hosts, run.link) == (2, None)
    record = json.loads((real_hosts / "comm.json").read_text())
    record["plan"] = {"link_bits_per_second": 1e10}
    write_json(real_hosts / "comm.json", record)
    found = calibrate([str(real_hosts)])
    assert [one.link for one in found.runs] == [Link(1e10)]
    assert found.links() == [Link(1e10)]


def test_emulated_nodes_without_a_limit_have_no_link_of_other_records(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write(root, "one-16", 1, 16, cluster="nodes=1,cpus=0.5")
    write(root, "two", 2, 32, strategy="ring", cluster="nodes=2,cpus=0.5")
    comm_record(root / "comm.json")
    (run,) = calibrate([str(root)]).runs
    assert (run.hosts, run.link) == (2, None)


def test_times_without_a_link_say_nothing_about_a_link(real_hosts: Path, tmp_path: Path) -> None:
    """They are those of the nominal link, and marked."""
    (found,) = planned(real_hosts, tmp_path, "--workers=4", "--link=100mbit")
    assert found["step_seconds"]["median"] > 1.5 * 4_400_000 / 12.5e6
    assert found["extrapolated_because"] == ["collectives on link 100mbit, measured none"]


@pytest.mark.parametrize(
    ("backend", "workers", "hosts", "expected"),
    [
        ("hierarchical", 2, 1, "shm"),
        ("hierarchical", 4, 2, "hierarchical"),
        ("hierarchical", 2, 2, "gloo"),
        ("shm", 2, 2, "gloo"),
        ("shm", 4, 2, "hierarchical"),
        ("shm", 4, 1, "shm"),
        ("gloo", 4, 2, "gloo"),
        ("nccl", 4, 1, "nccl"),
    ],
)
def test_only_memory_of_a_host_is_shared(
    backend: str, workers: int, hosts: int, expected: str
) -> None:
    assert backend_on(backend, workers, hosts) == expected


def test_shared_memory_of_one_host_is_planned_across_hosts_by_their_collectives(
    tmp_path: Path,
) -> None:
    root = tmp_path / "runs"
    for batch in (16, 64):
        write(root, f"one-{batch}", 1, batch, cluster=None)
    settings: dict[str, Any] = {"cluster": None, "nnodes": 1, "nproc_per_node": 2}
    settings["communicator"] = "hierarchical"
    write(root, "two", 2, 64, strategy="ring", **settings)
    comm_record(root / "comm.json")
    link = "--link=1gbit,200us"
    (found,) = planned(root, tmp_path, "--workers=4", link)
    assert found["extrapolated_because"] == []


def run_on(hosts: int) -> MeasuredRun:
    phases = {**point(32, 0.042).phases, "exchange": 0.05}
    link = LINK if hosts > 1 else None
    return MeasuredRun("ring", {}, "gloo", 2, hosts, link, 32, 0.092, phases)


def test_runs_in_a_place_that_was_not_measured_do_not_prevent_other_predictions() -> None:
    known = replace(calibration(), runs=(run_on(1), run_on(2)))
    Predictor(known, samples=3).predict(Target("ring", 4, 64, link=LINK))


def test_workers_of_one_host_say_nothing_about_more_hosts() -> None:
    more = replace(timing("all_reduce", "ring", 1e-3, 100e6, link=None), workers=16)
    known = replace(calibration(), collectives=(*calibration().collectives, more))
    across = Target("ring", 64, 512, link=LINK)
    assert "64 workers, measured 2" in Predictor(known, samples=3).extrapolations(across)
    within = replace(across, link=None)
    assert not any("64 workers" in each for each in Predictor(known, 3).extrapolations(within))


def test_rings_of_several_workers_per_host_share_no_connection() -> None:
    """Only those of two workers do: each of two hierarchical ones, but not one of all four."""
    place = Place("gloo", True, LINK)
    (flat,) = levels_of("all_reduce", "ring", 4, 2, 1e6, place)
    assert flat.members == 4
    levels = levels_of("all_reduce", "library", 4, 2, 1e6, replace(place, backend="hierarchical"))
    assert [each.members for each in levels] == [2, 2, 2]


def test_equal_sizes_of_a_record_are_one_point(tmp_path: Path) -> None:
    """Small sizes are rounded up to a multiple of the workers."""
    record = json.loads(comm_record(tmp_path / "comm.json").read_text())
    for one in record["measurements"][:2]:
        one["bytes"] = 1024
    first: CollectiveTiming = comm_timings(record, "comm.json")[0]
    assert [each.size_bytes for each in first.points] == [1024, 2**22, 2**24, 2**26]
    assert len(first.points[0].seconds) == 10
