"""Training with Lightning Fabric: torchrun --nproc-per-node 2 train_fabric.py --backend gloo"""

from __future__ import annotations

import os

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from task import Report, backend, batches, build_model
from torch.nn import functional as F
from torch.optim import SGD

strategy = DDPStrategy(process_group_backend=backend())
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
fabric.launch()
plain = build_model()
model, optimizer = fabric.setup(plain, SGD(plain.parameters(), lr=0.02, momentum=0.9))
report = Report()
for inputs, labels in zip(*batches(fabric.global_rank), strict=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    fabric.backward(loss)
    optimizer.step()
    report.step(loss)
if fabric.is_global_zero:
    report.print()
dist.destroy_process_group()
