"""A character model trained with Hugging Face Accelerate.

accelerate launch --multi_gpu --num_processes 2 examples/plain_accelerate.py

Without a GPU, the two processes use the CPU.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ALPHABET = "0123456789+= "


def sums(count: int, width: int = 12) -> Tensor:
    """Tokens of additions such as "38+7=45", padded with spaces."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(100, (count, 2), generator=generator).tolist()
    texts = [f"{one}+{other}={one + other}".ljust(width) for one, other in pairs]
    return torch.tensor([[ALPHABET.index(character) for character in text] for text in texts])


class Recurrent(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        logits: Tensor = self.output(hidden)
        return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(0)
    tokens = sums(4608)
    loader = DataLoader(TensorDataset(tokens[:4096]), batch_size=32, shuffle=True)
    tests = DataLoader(TensorDataset(tokens[4096:]), batch_size=64)
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=256)
    model, optimizer, loader, tests, schedule = accelerator.prepare(
        model, optimizer, loader, tests, schedule
    )

    for epoch in range(2):
        model.train()
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        with torch.no_grad():
            for (batch,) in tests:
                loss = loss_of(model, batch).repeat(len(batch))
                losses.append(accelerator.gather_for_metrics(loss))
        accelerator.print(f"epoch {epoch}: test loss {torch.cat(losses).mean():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
