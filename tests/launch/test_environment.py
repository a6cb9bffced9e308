"""Rank detection from the variables of torchrun and srun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from paceline import cli
from paceline.comm import hierarchical, shared_gpu
from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.config import RunConfig
from paceline.errors import UsageError
from paceline.launch import worker
from paceline.launch.environment import detect
from paceline.launch.worker import has_own_gpu

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[03-05]",
}


def test_without_a_launcher_there_is_no_rank() -> None:
    assert detect({"HOME": "/root", "WORLD_SIZE": "4"}) is None


def test_torchruns_variables_are_taken_as_they_are() -> None:
    assert detect(TORCHRUN) == RankInfo(
        rank=5,
        world_size=6,
        local_rank=1,
        local_world_size=2,
        node_rank=2,
        nnodes=3,
        master_addr="10.0.0.7",
        master_port=1234,
        has_external_store=True,
    )


def test_rank_info_survives_a_round_trip_through_the_environment() -> None:
    rank_info = detect(SRUN)
    assert rank_info is not None
    assert detect(rank_info.to_environment()) == rank_info


def test_srun_gives_rank_node_and_the_first_host() -> None:
    rank_info = detect(SRUN)
    assert rank_info is not None
    assert (rank_info.rank, rank_info.world_size) == (5, 6)
    assert (rank_info.local_rank, rank_info.local_world_size) == (1, 2)
    assert (rank_info.node_rank, rank_info.nnodes) == (2, 3)
    assert rank_info.master_addr == "node03"
    assert not rank_info.has_external_store


def test_all_tasks_of_a_step_find_the_same_port_without_root_rights() -> None:
    ports = {detect({**SRUN, "SLURM_PROCID": str(rank)}).master_port for rank in range(6)}  # type: ignore[union-attr]
    assert len(ports) == 1
    assert 1024 <= ports.pop() <= 65535


def test_a_step_may_use_a_part_of_the_jobs_tasks() -> None:
    part = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1"}
    rank_info = detect(part)
    assert rank_info is not None
    assert (rank_info.world_size, rank_info.nnodes, rank_info.local_world_size) == (2, 1, 2)


def test_the_script_of_a_batch_job_has_no_rank() -> None:
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert detect(script) is None


def test_one_task_is_no_team() -> None:
    assert detect({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("solo", "solo"),
        ("alpha,beta", "alpha"),
        ("node[7,9-12]", "node7"),
        ("node[001-128]", "node001"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu-a[2-3],gpu-b[0-1]", "gpu-a2"),
        ("n[5]-ib0,n[6]-ib0", "n5-ib0"),
        ("", "127.0.0.1"),
    ],
)
def test_the_first_host_of_any_list_is_found(names: str, first: str) -> None:
    rank_info = detect({**SRUN, "SLURM_STEP_NODELIST": names})
    assert rank_info is not None
    assert rank_info.master_addr == first


def test_an_address_that_the_user_gives_counts_under_srun() -> None:
    rank_info = detect({**SRUN, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "999"})
    assert rank_info is not None
    assert (rank_info.master_addr, rank_info.master_port) == ("10.1.1.1", 999)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE"),
        ({**TORCHRUN, "RANK": ""}, "RANK"),
        ({name: value for name, value in TORCHRUN.items() if name != "WORLD_SIZE"}, "WORLD_SIZE"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID"),
    ],
)
def test_a_variable_that_is_not_a_number_is_rejected_by_name(
    variables: dict[str, str], name: str
) -> None:
    with pytest.raises(UsageError, match=f"environment variable {name}: must be a whole number"):
        detect(variables)


def test_unequal_numbers_of_tasks_are_rejected() -> None:
    with pytest.raises(UsageError, match="--ntasks-per-node"):
        detect({**SRUN, "SLURM_STEP_NUM_TASKS": "5"})


def test_settings_are_checked_against_the_workers_that_srun_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--shares", "2,1"]) == 2
    problem = "--shares: must be auto or 6 numbers above 0, one for each worker"
    assert problem in capsys.readouterr().err


def test_a_node_of_an_emulated_cluster_has_no_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All nodes share one GPU, which NCCL rejects."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("PACELINE_CLUSTER", raising=False)
    assert has_own_gpu(SINGLE_PROCESS)
    monkeypatch.setenv("PACELINE_CLUSTER", "/run/paceline/clusters/c.json")
    assert not has_own_gpu(SINGLE_PROCESS)


@pytest.mark.parametrize(
    ("gpus", "nnodes", "communicator", "cluster", "expected"),
    [
        (0, 1, "torch", False, "gloo"),
        (2, 1, "torch", False, "nccl"),
        (2, 2, "torch", False, "nccl"),
        (1, 1, "torch", False, "shared GPU"),
        (1, 2, "torch", False, "gloo"),
        (1, 1, "hierarchical", False, "gloo"),
        (1, 1, "torch", True, "gloo"),
        (2, 1, "torch", True, "gloo"),
    ],
)
def test_workers_connect_by_what_their_gpus_allow(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    nnodes: int,
    communicator: str,
    cluster: bool,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if cluster:
        monkeypatch.setenv("PACELINE_CLUSTER", "nodes=2")
    else:
        monkeypatch.delenv("PACELINE_CLUSTER", raising=False)
    connected: list[str] = []

    @contextmanager
    def connect(_rendezvous: object, gpu: object = None, **_: object) -> Iterator[object]:
        connected.append("nccl" if gpu is not None else "gloo")
        yield None

    @contextmanager
    def connect_shared(*_: object, **__: object) -> Iterator[object]:
        connected.append("shared GPU")
        yield None

    monkeypatch.setattr(worker, "connect", connect)
    monkeypatch.setattr(shared_gpu, "connect", connect_shared)
    monkeypatch.setattr(hierarchical, "connect", lambda *_: nullcontext())
    rank_info = replace(
        SINGLE_PROCESS,
        world_size=2 * nnodes,
        local_world_size=2,
        nnodes=nnodes,
        has_external_store=True,
    )
    with worker.connect_workers(RunConfig(communicator=communicator), rank_info):
        pass
    assert connected == [expected]
