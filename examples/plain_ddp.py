"""A convolutional network trained with DistributedDataParallel; plain PyTorch.

torchrun --nproc-per-node 2 examples/plain_ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Squares(Dataset[tuple[Tensor, int]]):
    """Noisy images of 32 x 32 pixels; the class is the quarter that has a bright square."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, 32, 32, generator=generator)
        quarter = index % 4
        row, column = 4 + 16 * (quarter // 2), 4 + 16 * (quarter % 2)
        image[0, row : row + 8, column : column + 8] += 1.0
        return image, quarter


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 4),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--checkpoint", help="file to save the weights to")
    arguments = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    training = Squares(2048)
    sampler: DistributedSampler[int] = DistributedSampler(training)
    loader = DataLoader(training, arguments.batch_size, sampler=sampler)
    tests = DataLoader(Squares(256), 64)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in tests:
                predicted = model(images.to(device)).argmax(1).cpu()
                correct += int((predicted == labels).sum())
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct / 256:.3f}")
            if arguments.checkpoint:
                torch.save(model.module.state_dict(), arguments.checkpoint)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
