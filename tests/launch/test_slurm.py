"""Runs as batch jobs of a real SLURM with three machines."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.launch import slurm
from paceline.records import RunFolder, read_json
from tests.support.commands import (
    ENDLESS,
    TINY,
    flags,
    free_port,
    is_training,
    launch,
    names_in,
    wait_until,
)
from tests.support.slurm_cluster import slurm_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.root]

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=world_size)
model = DistributedDataParallel(nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
sys.exit(3)
"""
"""Knows nothing of paceline."""

ONE_THREAD = {"threads": 1}
"""The sums of a layer depend on the number of threads, which follows from workers on a machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    with slurm_cluster() as conf:
        yield conf


@pytest.fixture(autouse=True)
def in_cluster(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)


def submit(out: Path, nodes: int, *words: str, **settings: Any) -> int:
    run = flags({**TINY, **ONE_THREAD, "out": out, "name": "run", **settings})
    return cli.main(["slurm", "--nodes", str(nodes), "--time", "5:00", *words, *run])


def job_of(out: Path, expected: str) -> slurm.Job:
    found = re.match(r"job (\d+): ", expected)
    assert found is not None
    return slurm.Job(found[1], out / f"run.slurm-{found[1]}.txt")


def test_a_job_trains_what_a_local_run_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In names of SLURM's own, %j is the number of the job.
    out = tmp_path / "10%j 50%%"
    assert submit(out, 3, "--wait") == 0
    here = launch(tmp_path / "here", **ONE_THREAD, nproc_per_node=3).result
    assert here is not None
    there = read_json(out / "run" / "result.json")
    assert there["status"] == "finished"
    assert there["weights_sha256"] == here["weights_sha256"]
    assert (there["config"]["nnodes"], there["config"]["nproc_per_node"]) == (3, 1)
    assert [worker["node"] for worker in there["workers"]] == [0, 1, 2]
    assert all(node["rss_bytes_peak"] for node in there["nodes"])
    records = {f"{kind}-{number}.jsonl" for kind in ("events", "resources") for number in range(3)}
    assert records <= names_in(out / "run")
    expected = capsys.readouterr().out
    job = job_of(out, expected)
    assert names_in(out) == {"run", "run.sbatch", job.output.name}
    assert job.output.read_text() in expected
    assert "status      finished" in expected


def test_a_failing_worker_fails_the_job_with_the_first_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, 2, "--wait", model="user_code:Breaking") == 1
    expected = capsys.readouterr()
    cause = f"ValueError: the model broke (traceback in {tmp_path / 'run' / 'traceback.txt'})"
    assert expected.err == f"paceline: error: {cause}\n"
    assert read_json(tmp_path / "run" / "result.json")["cause"] == cause
    assert slurm.job_state(job_of(tmp_path, expected.out)) == "FAILED"


def test_a_cancelled_job_stops_workers_and_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_SLEEP_SECONDS", "0.02")
    settings = {**ENDLESS, "strategy": "parameter_server"}
    assert submit(tmp_path, 2, **settings) == 0
    job = job_of(tmp_path, capsys.readouterr().out)
    wait_until(lambda: is_training(tmp_path / "run"), "all workers train")
    subprocess.run(["scancel", job.id], check=True)
    assert slurm.follow(job) == "CANCELLED"
    result = RunFolder(tmp_path / "run").read_result()
    assert result is not None
    assert result["status"] == "stopped"
    assert result["cause"] == f"stopped by SIGTERM after iteration {result['iterations']}"
    passing = ("launch-", "report-", "failure-", "output-")
    assert not [name for name in names_in(tmp_path / "run") if name.startswith(passing)]


def test_a_job_that_slurm_rejects_is_reported_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(tmp_path, 1, "--partition", "absent") == 2
    expected = capsys.readouterr()
    assert expected.out == ""
    assert expected.err.startswith("paceline: error: sbatch rejected the job: ")
    assert expected.err.count("\n") == 1
    assert not names_in(tmp_path)


def test_a_profile_of_srun_has_all_ranks_and_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    words = ["profile", "--quiet", "--out", str(tmp_path), "--name", "run", "--"]
    srun = ["srun", "--nodes", "2", "--ntasks", "2", sys.executable, str(script), str(free_port())]
    assert cli.main([*words, *srun]) == 3
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["status"], result["cause"]) == ("failed", "srun ended with exit code 3")
    assert result["iterations"] == 20
    assert [worker["node"] for worker in result["workers"]] == [0, 1]
    for worker in result["workers"]:
        # 2 (P - 1) / P of the gradients, which are those of 64 inputs and 10 outputs.
        assert worker["traffic"]["gradients"]["bytes_sent"] == 20 * 4 * (64 + 1) * 10
