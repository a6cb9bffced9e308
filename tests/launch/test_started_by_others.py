"""Workers that torchrun or srun started: rejected models and the sampler's warnings."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from launch.commands import TINY, Command, Ended, flags, free_port, names_in
from paceline.comm.rank_info import RankInfo
from paceline.config import from_mapping
from paceline.launch import worker
from paceline.measure.sampler import ResourceSampler

ONLY = RankInfo(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    nnodes=1,
    master_addr="127.0.0.1",
    master_port=0,
    has_external_store=False,
)


def run_workers(outs: list[Path], nnodes: int) -> list[Ended]:
    """Workers with the variables that torchrun sets; `outs` are their disks."""
    port, local = free_port(), len(outs) // nnodes
    with contextlib.ExitStack() as stack:
        commands = []
        for rank, out in enumerate(outs):
            place = RankInfo(
                rank=rank,
                world_size=len(outs),
                local_rank=rank % local,
                local_world_size=local,
                node=rank // local,
                nnodes=nnodes,
                master_addr="127.0.0.1",
                master_port=port,
                has_external_store=False,
            )
            settings = {**TINY, "strategy": "own_code:Picky", "out": out, "name": "run"}
            words = ["-m", "paceline", "train", *flags(settings)]
            command = Command(words, place.to_environment())
            commands.append(stack.enter_context(command))
        return [command.end() for command in commands]


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_strategy_that_rejects_the_model_leaves_nothing(nnodes: int, tmp_path: Path) -> None:
    outs = [tmp_path / f"disk-{rank * nnodes // 2}" for rank in range(2)]
    ended = run_workers(outs, nnodes)
    assert [each.code for each in ended] == [2, 2]
    line = "paceline: error: --model: this strategy takes no model at all\n"
    assert ended[0].err == line
    assert not any(names_in(out) for out in set(outs))


def test_what_kept_resources_from_being_sampled_is_a_warning_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(sampler: ResourceSampler) -> None:
        sampler._warning = "resources were not sampled: no processes left"

    monkeypatch.setattr(ResourceSampler, "start", start)
    config = from_mapping({**TINY, "strategy": "single", "out": str(tmp_path), "name": "run"})
    place = dataclasses.replace(ONLY, master_port=free_port())
    result = worker.run(config, place, None, quiet=True).result
    assert result is not None
    assert "resources were not sampled: no processes left" in result["warnings"]
