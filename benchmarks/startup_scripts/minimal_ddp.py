"""A minimal DistributedDataParallel script, for `torchrun` in benchmarks/startup.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from network import LeNet, data
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    (inputs, labels), _ = data()
    model = DistributedDataParallel(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        chosen = range(64 * step + rank, 64 * (step + 1), size)
        optimizer.zero_grad()
        cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
