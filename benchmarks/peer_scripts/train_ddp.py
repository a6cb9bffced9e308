"""Training with DistributedDataParallel: torchrun --nproc-per-node 2 train_ddp.py --backend gloo"""

from __future__ import annotations

import torch.distributed as dist
from task import Report, backend, batches, build_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

dist.init_process_group(backend())
model = DistributedDataParallel(build_model())
optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
report = Report()
for inputs, labels in zip(*batches(dist.get_rank()), strict=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    report.step(loss)
if dist.get_rank() == 0:
    report.print()
dist.destroy_process_group()
