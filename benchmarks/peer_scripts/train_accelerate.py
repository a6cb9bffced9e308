"""Training with Accelerate: torchrun --nproc-per-node 2 train_accelerate.py --backend gloo

Accelerate accepts only gloo on a CPU, but uses a process group that already exists.
"""

from __future__ import annotations

import torch.distributed as dist
from accelerate import Accelerator
from task import Report, backend, batches, build_model
from torch.nn import functional as F
from torch.optim import SGD

dist.init_process_group(backend())
accelerator = Accelerator(cpu=True)
plain = build_model()
model, optimizer = accelerator.prepare(plain, SGD(plain.parameters(), lr=0.02, momentum=0.9))
report = Report()
for inputs, labels in zip(*batches(accelerator.process_index), strict=True):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    report.step(loss)
if accelerator.is_main_process:
    report.print()
accelerator.end_training()
