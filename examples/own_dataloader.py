"""Your own DataLoader, sampler and evaluation, with records for `paceline report`, `compare`, `ui`.

python examples/own_dataloader.py                             one worker
torchrun --nproc-per-node 2 examples/own_dataloader.py        two workers

Both end with a line that says where the records are; `paceline report` makes a page of them.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline


def spirals(samples: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three arms of a spiral; which arm is the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=generator)
    angle = 4 * radius + 2.1 * labels + 0.2 * torch.randn(samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels


torch.set_num_threads(1)  # so small a model gains nothing from more
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
inputs, labels = spirals()
dataset = TensorDataset(inputs[:500], labels[:500])

with paceline.join(strategy="overlap") as team:
    # Each worker reads its own batches: 60 samples over all workers.
    loader = DataLoader(
        dataset,
        batch_size=60 // team.world_size,
        sampler=DistributedSampler(dataset, team.world_size, team.rank),
    )
    trained, _, batches = team.prepare(model, optimizer, loader)
    for epoch in range(20):
        for x, y in batches:  # calls set_epoch of the sampler, and counts the time as input
            team.backward(F.cross_entropy(trained(x), y))  # records the loss
            team.step()
        if epoch % 5 == 4:
            with team.evaluating():  # all workers: the weights to evaluate are in the model
                scores = trained(inputs[500:])
            accuracy = (scores.argmax(1) == labels[500:]).float().mean()
            team.log(test_loss=F.cross_entropy(scores, labels[500:]), test_accuracy=accuracy)
            if team.is_first:
                print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")
