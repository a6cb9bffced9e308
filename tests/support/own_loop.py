"""A user's own training loop: `python -m own_loop OUT HOW`, run by each worker.

It has 48 samples in global batches of 12 and trains for four epochs. HOW is `dataset`, `loader`, or
`raise` or `terminate`, with which rank 1, or the only one, raises an exception or gets SIGTERM in
the third epoch.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from user_code import Plain, data  # type: ignore[import-not-found]  # beside it

import paceline
from paceline.data.sampling import GlobalBatchSampler, shard_bounds

SAMPLES, BATCH = 48, 12


class SameShards:
    """A batch sampler that deals as paceline does, so that both ways train the same weights."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._order = GlobalBatchSampler(SAMPLES, BATCH, seed=0)
        self._rank, self._world_size, self._epoch = rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self):  # type: ignore[no-untyped-def]
        for index in range(len(self)):
            chosen = self._order.batch(self._epoch, index)
            bounds = shard_bounds(len(chosen), [1.0] * self._world_size, self._rank)
            yield chosen[bounds].tolist()

    def __len__(self) -> int:
        return self._order.batches_per_epoch


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("a damaged sample")
    if how == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)


def main(out: str, how: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (inputs, labels), _ = data()
    dataset = TensorDataset(inputs[:SAMPLES], labels[:SAMPLES])
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with paceline.join("allreduce", out=out, name=how, timeout_seconds=40) as team:
        if how == "loader":
            loader = DataLoader(dataset, batch_sampler=SameShards(team.rank, team.world_size))
            trained, _, batches = team.prepare(model, optimizer, loader)
        else:
            trained, _, batches = team.prepare(model, optimizer, dataset, batch_size=BATCH)
        for epoch in range(4):
            for x, y in batches:
                if epoch == 2 and team.rank == team.world_size - 1:
                    fail(how)
                team.backward(F.cross_entropy(trained(x), y))
                team.step()
            with team.evaluating():
                scores = trained(inputs)
            team.log(
                test_loss=F.cross_entropy(scores, labels),
                test_accuracy=(scores.argmax(1) == labels).float().mean(),
                largest_score=scores.max(),
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
