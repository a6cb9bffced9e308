"""Where a worker belongs: its rank, from the variables that its launcher set, and ports.

Launchers are torchrun, srun and paceline's own (launch/processes.py).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping

from paceline.comm.rank_info import RankInfo
from paceline.config import RunConfig
from paceline.errors import UsageError, shown


def free_port(address: str) -> int:
    """A TCP port of this machine that is not in use, for an address of this family."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def store_port(config: RunConfig, nnodes: int) -> int:
    """The port to serve the rendezvous store on; 0, any free one, if no other node joins."""
    return config.master_port if nnodes > 1 else 0


def detect(variables: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The rank that the environment variables assign to this process; None without any."""
    if "LOCAL_RANK" in variables and "RANK" in variables:
        return _from_torchrun(variables)
    # The script of a batch job has a rank as well, but it is not a worker: it has no step.
    if "SLURM_STEP_ID" in variables and _slurm_number(variables, "NUM_TASKS", "NTASKS", 1) > 1:
        return _from_slurm(variables)
    return None


def _from_torchrun(variables: Mapping[str, str]) -> RankInfo:
    world_size, local = _number(variables, "WORLD_SIZE"), _number(variables, "LOCAL_WORLD_SIZE")
    return RankInfo(
        rank=_number(variables, "RANK"),
        world_size=world_size,
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=local,
        node_rank=_number(variables, "GROUP_RANK", _number(variables, "RANK") // local),
        nnodes=_number(variables, "GROUP_WORLD_SIZE", -(-world_size // local)),
        master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(variables, "MASTER_PORT", 29500),
        has_external_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def _from_slurm(variables: Mapping[str, str]) -> RankInfo:
    nnodes = _slurm_number(variables, "NUM_NODES", "NNODES", 1)
    world_size = _slurm_number(variables, "NUM_TASKS", "NTASKS", 1)
    if world_size % nnodes:
        raise UsageError(
            f"srun started {world_size} tasks on {nnodes} nodes: give each node the same number"
            " of them with --ntasks-per-node"
        )
    return RankInfo(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=world_size // nnodes,
        node_rank=_number(variables, "SLURM_NODEID"),
        nnodes=nnodes,
        master_addr=variables.get("MASTER_ADDR") or _slurm_first_host(variables),
        master_port=_number(variables, "MASTER_PORT", _slurm_port(variables)),
        has_external_store=False,
    )


def _slurm_number(variables: Mapping[str, str], of_step: str, of_job: str, default: int) -> int:
    """The step's value if it is set, because a step may use fewer tasks than the job has."""
    return _number(
        variables, f"SLURM_STEP_{of_step}", _number(variables, f"SLURM_{of_job}", default)
    )


def _slurm_first_host(variables: Mapping[str, str]) -> str:
    """The first host of a list such as `node[03-05,9],other` or `rack[1-2]node[3-4]`."""
    names = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])+", names)
    if entry is None:
        return "127.0.0.1"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry[0])


def _slurm_port(variables: Mapping[str, str]) -> int:
    """A port that all steps of a job derive alike and other jobs are unlikely to use."""
    return 20_000 + _number(variables, "SLURM_JOB_ID", 0) % 10_000


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"environment variable {name}: must be a whole number, got {shown(text)}"
        ) from None
