"""`paceline profile` of scripts that train on a GPU, with NCCL and CUDA graphs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.run import open_run
from paceline.analysis.script import findings as found
from paceline.analysis.script.findings import ScriptFinding, find_in_script
from paceline.cli import main

pytestmark = pytest.mark.gpu

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
STEPS = 40
WIDTH, LAYERS = 1024, 4
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)

MODEL = f"""
import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})]).cuda()
"""

DDP = f"""{MODEL}
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(2048, {WIDTH}, device="cuda")
for step in range({STEPS}):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
dist.barrier()
dist.destroy_process_group()
"""

FSDP = f"""{MODEL}
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
batch = torch.randn(2048, {WIDTH}, device="cuda")
for step in range({STEPS}):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

BATCH = 4096


def loader_script(*, is_pinned: bool) -> str:
    return f"""{MODEL}
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn({2 * BATCH}, {WIDTH}), torch.zeros({2 * BATCH}))
loader = DataLoader(data, batch_size={BATCH}, pin_memory={is_pinned})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
total = 0.0
for epoch in range({STEPS // 2}):
    for inputs, targets in loader:
        inputs = inputs.to("cuda", non_blocking={is_pinned})
        targets = targets.cuda(non_blocking={is_pinned})
        optimizer.zero_grad()
        loss = (model(inputs).mean(dim=1) - targets).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
"""


WARMUP = 3

GRAPHS = f"""{MODEL}
import copy

dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
batch = torch.randn(512, {WIDTH}, device="cuda")


def compute(net):
    net(batch).square().mean().backward()
    works = [dist.all_reduce(each.grad, async_op=True) for each in net.parameters()]
    for work in works:
        work.wait()
    dist.all_reduce(batch)


def train(net, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        compute(net)
        optimizer.step()


expected = copy.deepcopy(model)
initial = copy.deepcopy(model)
dist.all_reduce(batch)

# The whole step is captured, before the profiler has seen another one.
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with torch.cuda.stream(side):
    compute(model)
torch.cuda.current_stream().wait_stream(side)
whole = torch.cuda.CUDAGraph()
with torch.cuda.graph(whole):
    optimizer.zero_grad(set_to_none=False)
    compute(model)
    optimizer.step()
for _ in range(5):
    whole.replay()
torch.cuda.synchronize()

# The usual way: optimizer steps are not part of the graph.
model.load_state_dict(initial.state_dict())
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    train(model, {WARMUP})
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    optimizer.zero_grad(set_to_none=False)
    compute(model)
for _ in range({STEPS}):
    graph.replay()
    optimizer.step()

train(expected, {WARMUP + STEPS})
for one, other in zip(model.parameters(), expected.parameters()):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


def profile(folder: Path, script: str, *launcher: str) -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(script)
    command = [sys.executable, *launcher, str(path)]
    options = ["profile", "--out", str(folder), "--name", "run"]
    assert main([*options, "--", *command]) == 0
    result: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["warnings"] == []
    for worker in result["workers"]:
        phases = math.fsum(worker["phases"].values())
        assert phases == pytest.approx(worker["wall_seconds"], rel=0.01)
        assert min(worker["phases"].values()) >= 0
        assert worker["phases"]["forward"] > 0
    return result


def findings(folder: Path) -> list[ScriptFinding]:
    return find_in_script(open_run(folder / "run"))


def test_collectives_of_nccl_have_bytes_and_gpu_time(tmp_path: Path) -> None:
    result = profile(tmp_path, DDP, *TORCHRUN)
    (worker,) = result["workers"]
    assert result["iterations"] == STEPS
    reduced = worker["collectives"]["all_reduce"]
    # Gradients and the mean loss.
    assert reduced["bytes"] == STEPS * (PARAMETER_BYTES + 4)
    # DDP rebuilds its buckets after the first step.
    buckets = len(worker["ddp"][0]["bucket_bytes"])
    assert reduced["count"] > (STEPS - 1) * (buckets + 1)
    assert 0 < reduced["exposed_seconds"] <= reduced["seconds"] < worker["wall_seconds"]
    steady = worker["after_first"]["phases"]
    assert min(steady[phase] for phase in ("forward", "backward", "exchange", "update")) > 0
    assert worker["hidden_exchange_seconds"] < worker["wall_seconds"]
    # A collective of NCCL is put into the stream; the program does not wait for it.
    assert not [one for one in findings(tmp_path) if isinstance(one, found.BlockingCall)]


def test_fsdp_on_a_gpu(tmp_path: Path) -> None:
    result = profile(tmp_path, FSDP, *TORCHRUN)
    assert result["iterations"] == STEPS
    assert result["workers"][0]["phases"]["backward"] > 0


@pytest.mark.parametrize("is_pinned", [True, False])
def test_copies_to_the_gpu_and_read_backs(tmp_path: Path, is_pinned: bool) -> None:
    result = profile(tmp_path, loader_script(is_pinned=is_pinned))
    copies = result["workers"][0]["host_to_device"]
    # Those of the first step come before it is known that there is a GPU.
    steps = STEPS - 1
    size_bytes = steps * (BATCH * WIDTH * 4 + BATCH * 4)
    assert (copies["iterations"], copies["count"]) == (steps, 2 * steps)
    assert copies["bytes"] == size_bytes
    assert copies["pageable_bytes"] == (0 if is_pinned else size_bytes)
    assert 0 < copies["gpu_seconds"] < result["wall_seconds"]
    named = findings(tmp_path)
    (call,) = (one for one in named if isinstance(one, found.BlockingCall))
    assert (call.call, call.line.code) == ("Tensor.item", "total += loss.item()")
    blocking = [one for one in named if isinstance(one, found.BlockingCopy)]
    if is_pinned:
        assert blocking == []
    else:
        assert blocking[0].is_pageable
        assert blocking[0].line.code.startswith("inputs = inputs.to(")


def test_graphs_are_captured_and_replayed(tmp_path: Path) -> None:
    result = profile(tmp_path, GRAPHS, *TORCHRUN)
    (worker,) = result["workers"]
    # Steps of warmup, with replayed gradients, and of the comparison; a captured one is none.
    assert result["iterations"] == WARMUP + STEPS + WARMUP + STEPS
    # What a graph contains is not recorded.
    eager = 1 + 1 + WARMUP + (WARMUP + STEPS)
    count = worker["collectives"]["all_reduce"]["count"]
    assert count == 1 + (eager - 1) * (2 * LAYERS + 1)
