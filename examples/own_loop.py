"""Your own model, data and training loop, made data-parallel in five lines (marked with *).

python examples/own_loop.py                                   one worker
torchrun --nproc-per-node 2 examples/own_loop.py              two workers, the same weights
torchrun --nproc-per-node 2 examples/own_loop.py ring         another strategy
paceline compare runs                                         overlap and ring side by side
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import paceline


def spirals(samples: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three arms of a spiral; which arm is the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=generator)
    angle = 4 * radius + 2.1 * labels + 0.2 * torch.randn(samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


strategy = sys.argv[1] if len(sys.argv) > 1 else "overlap"

torch.set_num_threads(1)  # so small a model gains nothing from more
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
inputs, labels = spirals()

with paceline.join(strategy=strategy) as team:  # * meet the other workers, if there are any
    # * All start from the first worker's weights. The batch of 60 is that of all workers together;
    #   each of them gets its share of it.
    trained, _, batches = team.prepare(model, optimizer, (inputs, labels), batch_size=60)
    for epoch in range(20):
        for x, y in batches:  # every pass is a new epoch, in a new order
            loss = F.cross_entropy(trained(x), y)  # the mean over this worker's samples
            team.backward(loss)  # * instead of loss.backward()
            team.step()  # * instead of optimizer.step() and optimizer.zero_grad()
        if team.is_first and epoch % 5 == 4:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

if team.is_first:
    right = (model(inputs).argmax(1) == labels).float().mean()
    weights = sum(weight.double().sum() for weight in model.parameters())
    print(f"accuracy {right:.3f}, sum of weights {weights:.6f}, workers {team.world_size}")
    account = team.account()
    print("seconds:", {phase: round(spent, 3) for phase, spent in account["phases"].items()})
    print("gradients sent:", account["traffic"]["gradients"]["bytes_sent"], "bytes")
