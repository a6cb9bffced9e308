"""Training with DistributedDataParallel on a worker, with either backend."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.communicator import Communicator
from paceline.errors import PeerError
from tests.torch_backend.backend_operations import default_group

SMALL_BUCKETS_MB = 0.001
"""Small enough that there are several buckets, as in large models."""

STEPS = 6


class TwoHeads(nn.Module):
    """Has buffers, and parameters that a step may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(40, 5), nn.Linear(40, 5)])

    def forward(self, batch: Tensor, head: int | None = None) -> Tensor:
        hidden = self.body(batch)
        outputs: list[Tensor] = [each(hidden) for each in self.heads]
        return outputs[0] + outputs[1] if head is None else outputs[head]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating without sync": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "half precision hook": {},
    "uneven inputs": {},
}
"""Arguments of DistributedDataParallel by kind of training."""


def train(kind: str, group: dist.ProcessGroup) -> list[float]:
    """Return the losses, then the sums of parameters and buffers."""
    torch.manual_seed(group.rank())  # DDP broadcasts the weights of rank 0
    model = TwoHeads()
    replica = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=SMALL_BUCKETS_MB, **OPTIONS[kind]
    )
    if kind == "half precision hook":
        replica.register_comm_hook(group, fp16_compress_hook)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with ExitStack() as stack:
        steps = STEPS
        if kind == "uneven inputs":
            stack.enter_context(replica.join())
            steps += group.rank()
        for step in range(steps):
            head = (step + group.rank()) % 2 if kind == "unused parameters" else None
            with ExitStack() as part:
                if kind == "accumulating without sync" and step % 3 != 2:
                    part.enter_context(replica.no_sync())
                loss = replica(torch.randn(8, 12), head).square().mean()
                loss.backward()
            losses.append(float(loss.detach()))
            if kind != "accumulating without sync" or step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    state = [float(each.double().sum()) for each in model.state_dict().values()]
    return [*losses, *state]


def train_twice(communicator: Communicator, file: Path, way: str, kind: str) -> list[list[float]]:
    """Train with paceline and with gloo."""
    with default_group(communicator, file, way) as ours:
        return [train(kind, ours), train(kind, dist.new_group(backend="gloo"))]


def lose_a_peer_in_training(communicator: Communicator, file: Path, way: str) -> str:
    """Return the error on rank 0 when the other rank is killed before its third step."""
    with default_group(communicator, file, way):
        replica = DistributedDataParallel(nn.Linear(100, 100), bucket_cap_mb=SMALL_BUCKETS_MB)
        try:
            for step in range(5):
                if communicator.rank == 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                replica(torch.ones(3, 100)).sum().backward()
        except PeerError as error:
            return str(error)
        return "no error"
