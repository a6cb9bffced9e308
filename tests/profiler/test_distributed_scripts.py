"""`paceline profile -- torchrun ...` accounts for the communication of a script."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.profiler import FACTOR_VARIABLE
from paceline.records import PHASES
from paceline.report.summary import sampled_text

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(150):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    if step == 100:
        dist.all_reduce(torch.ones(100))
    optimizer.step()
total = torch.tensor(1.0)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("sum", total.item())
dist.destroy_process_group()
"""

CHANGING_SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
for features, steps in ((8, 150), (64, 90)):
    model = DistributedDataParallel(nn.Linear(features, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, features)).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
"""

STEPS = 150
PARAMETER_BYTES = 4 * (64 * 256 + 256 + 2 * 256 + 256 * 10 + 10)


@pytest.fixture(scope="module", params=["1", "4"], ids=["all steps", "windows of steps"])
def result(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """With all collectives recorded, and with those of one in four windows."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FACTOR_VARIABLE, request.param)
        yield profile(folder)


def profile(folder: Path, text: str = SCRIPT) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(text)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["profile", "--quiet", "--out", str(folder), "--name", "run"]
    assert main([*options, "--", *launcher, "--standalone", str(script)]) == 0
    values: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return values


def test_nothing_went_wrong(result: dict[str, Any]) -> None:
    assert result["status"] == "finished"
    assert result["warnings"] == []
    assert result["iterations"] == STEPS


def test_bytes_are_those_of_the_formula(result: dict[str, Any]) -> None:
    # Also of steps that were not recorded.
    for worker in result["workers"]:
        # 2 (P - 1) / P of the gradients.
        assert worker["traffic"]["gradients"]["bytes_sent"] == STEPS * PARAMETER_BYTES
        assert worker["traffic"]["gradients"]["bytes_received"] == STEPS * PARAMETER_BYTES
    sent = result["workers"][0]["traffic"]["buffers"]["bytes_sent"]
    assert sent == result["workers"][1]["traffic"]["buffers"]["bytes_received"]
    # Mean, variance and the number of batches.
    assert sent == STEPS * (2 * 256 * 4 + 8)


def test_a_call_of_the_script_counts_once_although_it_is_between_windows(
    result: dict[str, Any],
) -> None:
    for worker in result["workers"]:
        # Of the metrics, DDP exchanges a few bytes before the first step.
        assert 400 <= worker["traffic"]["metrics"]["bytes_sent"] < 600


def test_phases_add_up_and_have_communication(result: dict[str, Any]) -> None:
    for worker in result["workers"]:
        assert math.fsum(worker["phases"].values()) == pytest.approx(
            worker["wall_seconds"], rel=0.01
        )
        for account in (worker, worker["after_first"]):
            assert min(account["phases"].values()) >= 0
            assert account["phases"]["exchange"] > 0
            assert account["hidden_exchange_seconds"] >= 0
        assert set(worker["phases"]) == set(PHASES)
        assert worker["collectives"]["all_reduce"]["count"] >= STEPS
        assert worker["ddp"][0]["bucket_bytes"] == [PARAMETER_BYTES]


def test_a_rank_waits_as_long_as_the_other_makes_it_wait(result: dict[str, Any]) -> None:
    one, other = result["workers"]
    symmetric = sum(one["collectives"][name]["count"] for name in ("all_reduce", "all_gather"))
    is_sampled = "collectives_recorded" in one
    last_arrivals = one["last_arrivals"] + other["last_arrivals"]
    # Numbers of both ranks are rounded.
    assert abs(last_arrivals - symmetric) <= 2 * is_sampled
    for waiting, late in ((one, other), (other, one)):
        # Without the all-reduce after the last step.
        assert 0 < waiting["phases"]["wait"] <= late["caused_wait_seconds"] + 1e-6


def test_the_result_says_in_which_steps_collectives_were_recorded(
    request: pytest.FixtureRequest, result: dict[str, Any]
) -> None:
    is_sampled = "windows" in request.node.callspec.id
    for worker in result["workers"]:
        # The first two windows of 16 steps, of the others those with numbers 2, 4 and 8, and from
        # the call of the script on the rest of its window and a whole one.
        expected = {"steps": 5 * 16 + 12 + 16, "of": STEPS} if is_sampled else None
        assert worker.get("collectives_recorded") == expected
        assert worker.get("steps_recorded") == expected
    text = "108 of 150 steps were recorded in full, because that slows down such short steps"
    assert sampled_text(result["workers"]).startswith(text if is_sampled else "")
    assert bool(sampled_text(result["workers"])) == is_sampled


def test_bytes_are_exact_if_the_script_goes_on_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "8")
    for worker in profile(tmp_path, CHANGING_SCRIPT)["workers"]:
        assert worker["collectives_recorded"]["steps"] < worker["collectives_recorded"]["of"] == 240
        assert worker["traffic"]["gradients"]["bytes_sent"] == 150 * 8 * 4 + 90 * 64 * 4
