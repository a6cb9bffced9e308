"""`paceline.profile`, `paceline.step` and the notebook extension."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import paceline
from paceline.errors import UsageError
from paceline.profiler import FOLDER_VARIABLE
from paceline.profiler.program import Profile
from tests.support.profiled import loader, loss_of, model, train_step


def test_a_block_is_profiled(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(tmp_path), name="own") as profile:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
    assert profile.folder == tmp_path / "own"
    result = profile.result
    assert result is not None
    assert (result["kind"], result["status"], result["iterations"]) == ("profile", "finished", 3)
    assert result["workers"][0]["phases"]["backward"] > 0


def test_steps_of_a_loop_without_a_torch_optimizer(tmp_path: Path) -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(tmp_path), name="own") as profile:
        for inputs, targets in loader(5):
            # Does not end a step, because the program says where steps end.
            optimizer.step()
            loss = loss_of(net, inputs @ weight, targets)
            (gradient,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight -= 0.1 * gradient
            paceline.step()
    assert profile.result is not None
    assert profile.result["iterations"] == 5


def test_a_failing_block_leaves_records(tmp_path: Path) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    profile = None
    try:
        with paceline.profile(out=str(tmp_path), name="own") as profile:
            for batch in loader(3):
                train_step(net, optimizer, *batch)
            raise RuntimeError("out of data")
    except RuntimeError:
        pass
    assert profile is not None
    assert profile.result is not None
    assert profile.result["status"] == "failed"
    assert profile.result["cause"] == "RuntimeError: out of data"


def test_a_folder_that_is_removed_does_not_stop_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(tmp_path), name="own") as profile:
        for batch in loader(3):
            train_step(net, optimizer, *batch)
        shutil.rmtree(tmp_path / "own")
    assert profile.result is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: the records are incomplete: cannot write")


def test_a_step_outside_a_profile_does_nothing() -> None:
    paceline.step()


def test_the_command_measures_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with paceline.profile() as profile:
        pass
    assert profile == Profile(tmp_path)


def test_an_existing_name_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with (
        pytest.raises(UsageError, match="exists already"),
        paceline.profile(out=str(tmp_path), name="own"),
    ):
        pass


def test_a_notebook_is_profiled_from_loading_to_unloading_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    paceline.load_ipython_extension(None)
    for batch in loader(3):
        train_step(net, optimizer, *batch)
    paceline.unload_ipython_extension(None)
    printed = capsys.readouterr().out
    assert "backward" in printed
    (page,) = (tmp_path / "runs").glob("*/report.html")
    assert str(page) in printed


def train_as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    net = DistributedDataParallel(model())
    optimizer = SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(folder), name="own") as profile:
        for batch in loader(4):
            train_step(net, optimizer, *batch)
    dist.destroy_process_group()
    assert (profile.result is None) == (rank == 1)


def test_ranks_share_one_profile(tmp_path: Path) -> None:
    ranks = [
        multiprocessing.get_context("fork").Process(target=train_as_rank, args=(rank, tmp_path))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    result = json.loads((tmp_path / "own" / "result.json").read_text())
    assert result["config"]["world_size"] == 2
    assert [worker["rank"] for worker in result["workers"]] == [0, 1]
    assert result["warnings"] == []
    sent = [worker["traffic"]["gradients"]["bytes_sent"] for worker in result["workers"]]
    # Two linear layers of two inputs and outputs, in four steps; two ranks send it once.
    assert sent == [4 * 4 * 2 * (4 + 2)] * 2
