"""Your own DistributedDataParallel program, quicker on one host by one line (marked with *).

torchrun --nproc-per-node 2 examples/own_ddp.py               two workers, shared memory
torchrun --nproc-per-node 2 examples/own_ddp.py gloo          the same over PyTorch's own backend
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline.backend  # noqa: F401 - makes the name known; not needed where paceline is installed

torch.set_num_threads(1)  # so small a model gains nothing from more
backend = sys.argv[1] if len(sys.argv) > 1 else "paceline"
dist.init_process_group(backend)  # * instead of "gloo"; everything else is as it was

torch.manual_seed(0)
labels = torch.arange(600) % 3
radius = torch.rand(600)
angle = 4 * radius + 2.1 * labels + 0.2 * torch.randn(600)
inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)  # three arms of a spiral

model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
replica = DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.5, momentum=0.9)
for _ in range(20):
    for batch in torch.randperm(600).split(60):
        share = batch[dist.get_rank() :: dist.get_world_size()]
        loss = F.cross_entropy(replica(inputs[share]), labels[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if dist.get_rank() == 0:
    right = (model(inputs).argmax(1) == labels).float().mean()
    weights = sum(weight.double().sum() for weight in model.parameters())
    print(f"backend {dist.get_backend()}, workers {dist.get_world_size()}")
    print(f"accuracy {right:.3f}, sum of weights {weights:.12f}")
dist.destroy_process_group()
