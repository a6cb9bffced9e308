"""`paceline.profile`, `paceline.step` and the notebook extension."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import paceline
from paceline.comm.rank_info import RankInfo
from paceline.errors import RecordsError, UsageError
from paceline.profiler import FOLDER_VARIABLE
from paceline.profiler.collection import read_ranks
from paceline.profiler.program import Profile
from paceline.records import RunFolder
from paceline.report.build import write_report
from paceline.report.summary import print_summary
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


def test_a_block_without_steps_leaves_no_folder(tmp_path: Path) -> None:
    with paceline.profile(out=str(tmp_path), name="own") as profile:
        model()(torch.ones(1, 2))
    assert profile.result is not None
    (text,) = profile.result["warnings"]
    assert text.startswith("no training step was measured")
    assert "command" not in text
    assert not profile.folder.exists()


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


def test_a_block_writes_a_timeline_of_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    with paceline.profile(out=str(tmp_path), name="own", steps="1:4", trace=True) as profile:
        for batch in loader(6):
            train_step(net, optimizer, *batch)
    assert profile.result is not None
    assert profile.result["config"]["steps"] == "1:4"
    print_summary(RunFolder(profile.folder), profile.result)
    assert "start-up" not in capsys.readouterr().out
    page = write_report(profile.folder).page.with_suffix(".md").read_text()
    assert "before the first iteration" not in page
    assert "warm-up" not in page
    assert "exclude the first step that --steps selects" in page
    events = json.loads((tmp_path / "own" / "trace.json").read_text())["traceEvents"]
    slices = [event["name"] for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("step") for name in slices) == 3
    # Neither the backward pass nor the update of a step is split. Clearing the gradients is update.
    assert slices.count("backward") == 3
    assert slices.count("update") == 2 * 3


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


def test_a_block_inside_another_does_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with paceline.profile(out=str(tmp_path), name="outer") as outer:
            for batch in loader(2):
                train_step(net, optimizer, *batch)
            with paceline.profile(out=str(tmp_path), name="inner") as inner:
                for batch in loader(2):
                    train_step(net, optimizer, *batch)
            for batch in loader(2):
                train_step(net, optimizer, *batch)
    finally:
        dist.destroy_process_group()
    assert inner == Profile(outer.folder)
    assert outer.result is not None
    assert outer.result["iterations"] == 6
    assert not (tmp_path / "inner").exists()
    assert "verrid" not in capfd.readouterr().err


def test_an_existing_name_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with (
        pytest.raises(UsageError, match="own exists already: choose another name"),
        paceline.profile(out=str(tmp_path), name="own"),
    ):
        pass


class Shell:
    """The events of IPython."""

    def __init__(self) -> None:
        self.events = self
        self.registered: list[tuple[str, Callable[[object], None]]] = []

    def register(self, event: str, function: Callable[[object], None]) -> None:
        self.registered.append((event, function))

    def unregister(self, event: str, function: Callable[[object], None]) -> None:
        self.registered.remove((event, function))

    def run_cell(self, cell: Callable[[], None]) -> None:
        self._trigger("pre_run_cell")
        cell()
        self._trigger("post_run_cell")

    def _trigger(self, triggered: str) -> None:
        for event, function in list(self.registered):
            if event == triggered:
                function(None)


def test_a_notebook_is_profiled_from_loading_to_unloading_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    shell = Shell()
    paceline.load_ipython_extension(shell)
    for batch in loader(3):
        train_step(net, optimizer, *batch)
    paceline.unload_ipython_extension(shell)
    printed = capsys.readouterr().out
    assert "iterations  3" in printed
    (page,) = (tmp_path / "runs").glob("*-notebook-profile/report.html")
    assert str(page) in printed
    assert not shell.registered


def test_time_between_cells_that_train_is_not_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    shell, idle_seconds = Shell(), 0.3

    def train() -> None:
        for batch in loader(3):
            train_step(net, optimizer, *batch)

    def evaluate() -> None:
        with torch.no_grad():
            net(torch.ones(4, 2))

    def call() -> None:
        loss_of(net, torch.ones(4, 2), torch.ones(4, 2))

    def sleep() -> None:
        time.sleep(idle_seconds)

    cells = [train, sleep, train, evaluate, call, train]
    shell.run_cell(lambda: paceline.load_ipython_extension(shell))
    for cell in cells:
        time.sleep(idle_seconds)
        shell.run_cell(cell)
    shell.run_cell(lambda: paceline.unload_ipython_extension(shell))
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_ranks(RunFolder(folder))
    assert len(record.step_seconds) == 3 * 3
    assert max(record.step_seconds) < idle_seconds
    phases = dict(record.last["phases"])
    assert phases.pop("other") > (len(cells) + 1) * idle_seconds
    assert max(phases.values()) < idle_seconds


def train_as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with paceline.profile(out=str(folder), name="own") as profile:
        train_with_ddp()
    dist.destroy_process_group()
    assert (profile.result is None) == (rank == 1)


def profile_a_name_that_exists(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with (
        pytest.raises(RecordsError, match="own exists already: choose another name"),
        paceline.profile(out=str(folder), name="own"),
    ):
        pass
    dist.destroy_process_group()


def train_as_rank_of_torchrun(rank: int, folder: Path, port: int) -> None:
    """The program connects the ranks inside the block."""
    at = RankInfo(rank, 2, rank, 2, 0, 1, "127.0.0.1", port, has_external_store=True)
    os.environ.update(at.to_environment())
    with paceline.profile(out=str(folder), name="own") as profile:
        dist.init_process_group("gloo")
        train_with_ddp()
        dist.destroy_process_group()
    assert (profile.result is None) == (rank == 1)


def train_with_ddp() -> None:
    net = DistributedDataParallel(model())
    optimizer = SGD(net.parameters(), lr=0.1)
    for batch in loader(4):
        train_step(net, optimizer, *batch)


def test_an_existing_name_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=profile_a_name_that_exists, args=(rank, tmp_path)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


@pytest.mark.parametrize("is_connected_before", [True, False])
def test_ranks_share_one_profile(tmp_path: Path, is_connected_before: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    program: Any = train_as_rank if is_connected_before else train_as_rank_of_torchrun
    arguments = () if is_connected_before else (store.port,)
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=program, args=(rank, tmp_path, *arguments)
        )
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


@pytest.mark.parametrize("launcher", [{}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}])
def test_ranks_that_cannot_agree_are_told_to_connect_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **launcher}.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(UsageError, match="call init_process_group before profile"),
        paceline.profile(out=str(tmp_path)),
    ):
        pass
    assert not list(tmp_path.iterdir())
