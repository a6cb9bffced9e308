"""Workers that torchrun or srun started, and single workers: rejections, signals, warnings."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from pathlib import Path

import pytest

from paceline.comm.rank_info import SINGLE_PROCESS, RankInfo
from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.launch import worker
from paceline.launch.record_collection import parse_report, write_report
from paceline.measure.sampler import ResourceSampler
from paceline.records import RunFolder
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from tests.launch.test_reports import report_of
from tests.support.commands import TINY, Command, Ended, flags, free_port, names_in

ONLY = RankInfo(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
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
            rank_info = RankInfo(
                rank=rank,
                world_size=len(outs),
                local_rank=rank % local,
                local_world_size=local,
                node_rank=rank // local,
                nnodes=nnodes,
                master_addr="127.0.0.1",
                master_port=port,
                has_external_store=False,
            )
            settings = {**TINY, "strategy": "user_code:Picky", "out": out, "name": "run"}
            words = ["-m", "paceline", "train", *flags(settings)]
            command = Command(words, rank_info.to_environment())
            commands.append(stack.enter_context(command))
        return [command.end() for command in commands]


@pytest.mark.parametrize(("nnodes", "disks"), [(1, 1), (2, 1), (2, 2)])
def test_a_strategy_that_rejects_the_model_leaves_nothing(
    nnodes: int, disks: int, tmp_path: Path
) -> None:
    outs = [tmp_path / f"disk-{rank * disks // 2}" for rank in range(2)]
    ended = run_workers(outs, nnodes)
    assert [each.code for each in ended] == [2, 2]
    line = "paceline: error: --model: this strategy takes no model at all\n"
    assert ended[0].err == line
    assert not any(names_in(out) for out in set(outs))


REJECTED = {"status": "failed", "exit_code": 2, "cause": "no such model", "iterations": 0}


@pytest.mark.parametrize(
    ("shares_folder", "peer_iterations", "is_removed"),
    [(True, 0, False), (False, 0, True), (False, 5, False)],
    ids=["shared folder", "own folder", "own folder, another worker trained"],
)
def test_another_node_discards_only_its_own_untrained_folder(
    shares_folder: bool, peer_iterations: int, is_removed: bool, tmp_path: Path
) -> None:
    """Workers 2 and 3 are of the second node; the first node reads what is in a shared folder."""
    config = from_mapping({"out": str(tmp_path), "name": "run", "nnodes": 2, "nproc_per_node": 2})
    folder = RunFolder.create(config)
    rank_info = dataclasses.replace(
        ONLY, rank=2, world_size=4, local_world_size=2, node_rank=1, nnodes=2
    )
    values = {**report_of(2), **REJECTED}
    report = parse_report(values, "report", 2)
    peer = {**report_of(3), **REJECTED, "iterations": peer_iterations}
    for each in (report, parse_report(peer, "report", 3)):
        write_report(folder, each.worker["rank"], each)
        folder.events_file(each.worker["rank"]).write_text("")
    with pytest.raises(UsageError, match="no such model"):
        worker._conclude(config, folder, rank_info, report, None, shares_folder, is_new=True)
    left = names_in(tmp_path / "run") if (tmp_path / "run").exists() else set()
    assert {"config.json", "events-2.jsonl", "events-3.jsonl"} <= left or is_removed
    assert not (left and is_removed)
    assert ("report-2.json" in left) == shares_folder


def test_a_sampler_failure_is_a_warning_of_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(sampler: ResourceSampler) -> None:
        sampler._warning = "resources were not sampled: no processes left"

    monkeypatch.setattr(ResourceSampler, "start", start)
    config = from_mapping({**TINY, "strategy": "single", "out": str(tmp_path), "name": "run"})
    rank_info = dataclasses.replace(ONLY, master_port=free_port())
    result = worker.run(config, rank_info, None, quiet=True).result
    assert result is not None
    assert "resources were not sampled: no processes left" in result["warnings"]


def test_a_single_worker_serves_the_store_for_its_parameter_server(tmp_path: Path) -> None:
    """As with the variables of torchrun set by hand: no agent serves a store."""
    settings = {**TINY, "strategy": "parameter_server", "out": str(tmp_path), "name": "run"}
    config = from_mapping({**settings, "rendezvous_seconds": 30})
    outcome = worker.run(
        config, dataclasses.replace(ONLY, master_port=free_port()), None, quiet=True
    )
    assert outcome.exit_code == 0
    assert outcome.result is not None
    assert outcome.result["status"] == "finished"


class StoppedInSetup(Strategy):
    """Gets Ctrl-C after the run was prepared, and before its first iteration."""

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        signal.raise_signal(signal.SIGINT)


def test_a_single_worker_stops_on_a_signal_before_its_first_iteration(tmp_path: Path) -> None:
    strategy = f"{__name__}:{StoppedInSetup.__name__}"
    config = from_mapping({**TINY, "strategy": strategy, "out": str(tmp_path), "name": "run"})
    outcome = worker.run(config, SINGLE_PROCESS, None, quiet=True)
    assert outcome.exit_code == 130
    assert outcome.result is not None
    assert outcome.result["status"] == "stopped"
    assert outcome.result["cause"] == "stopped by SIGINT before training began"
    assert outcome.result["iterations"] == 0
