"""A training script with a planted fault, as a user could have written it. It knows no profiler.

    train.py FAULT --rank 1 --severity 1.3 --width 512 --batch 64 --seconds 3

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are those of torchrun.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WARM_UP = 10
FAULTS = ("none", "slow_rank", "slow_input", "item", "item_of_all", "no_workers", "threads")


class Samples(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, width: int, seconds: float) -> None:
        self.inputs = torch.randn(4096, width)
        self.seconds = seconds

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            # Storage that answers slowly.
            time.sleep(self.seconds)
        return self.inputs[index % 4096], index % 10


class SlowModel(nn.Module):
    """A core that is slower: the forward pass also takes what both passes lose on such a core."""

    def __init__(self, net: nn.Module, slowdown: float) -> None:
        super().__init__()
        self.net = net
        self.slowdown = slowdown
        self.backward_seconds = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        began = time.thread_time()
        outputs: torch.Tensor = self.net(inputs)
        spent = time.thread_time() - began + self.backward_seconds
        until = time.thread_time() + (self.slowdown - 1) * spent
        while time.thread_time() < until:
            pass
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--severity", type=float, default=1.3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    fault = options.fault

    dist.init_process_group("gloo")
    is_planted = dist.get_rank() == options.rank
    torch.manual_seed(0)
    # Two ranks share the two cores of the machine.
    torch.set_num_threads(round(options.severity) if fault == "threads" else 1)
    width = options.width
    net = nn.Sequential(
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )
    slow = SlowModel(net, options.severity if fault == "slow_rank" and is_planted else 1.0)
    model = DistributedDataParallel(slow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    has_slow_input = fault == "no_workers" or (fault == "slow_input" and is_planted)
    delay = options.severity / 1000 / options.batch if has_slow_input else 0.0
    loader = DataLoader(Samples(width, delay), batch_size=options.batch)

    history = []
    limit = 1 << 30
    began = 0.0
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        before = time.thread_time()
        loss.backward()
        slow.backward_seconds = time.thread_time() - before
        optimizer.step()
        if fault == "item":
            history.append(loss.item())
        if fault == "item_of_all":
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            history.append(mean.item() / 2)
        if step == 1:
            began = time.time()
        if step == WARM_UP:
            # All ranks take the same number of steps.
            rate = (WARM_UP - 1) / (time.time() - began)
            steps = torch.tensor(max(60, round(options.seconds * rate)))
            dist.broadcast(steps, 0)
            limit = int(steps)
        if step >= limit:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
