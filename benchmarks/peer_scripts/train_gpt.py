"""A small GPT on a file of tokens, as scripts in the style of nanoGPT train it: torch.compile, bf16
autocast, fused AdamW, clipped gradients, and random windows of a memory-mapped file.

    printf '100\n200\n' | python train_gpt.py --tokens FILE --batch 64 --context 256

Reads numbers of steps from standard input, trains as many, and prints one line of JSON for each:
its duration in seconds and its last loss. The first one includes compilation.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
PEAK_RATE, LAST_RATE, WARMUP, DECAY_STEPS = 1e-3, 1e-4, 100, 5000
CLIP_NORM = 1.0


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.shrink = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        samples, length, width = hidden.shape
        parts = self.queries_keys_values(self.attention_norm(hidden)).split(width, dim=2)
        queries, keys, values = (
            part.view(samples, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        attended = attended.transpose(1, 2).contiguous().view(samples, length, width)
        hidden = hidden + self.project(attended)
        mixed: Tensor = hidden + self.shrink(F.gelu(self.expand(self.norm(hidden))))
        return mixed


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                is_residual = name.endswith(("project.weight", "shrink.weight"))
                scale = 1 / math.sqrt(2 * layers) if is_residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


class Batches:
    """Random windows, copied to the GPU without waiting for it."""

    def __init__(self, file: Path, batch: int, context: int, device: torch.device) -> None:
        self.file, self.batch, self.context, self.device = file, batch, context, device

    def __call__(self) -> tuple[Tensor, Tensor]:
        # Opened for each batch: an array that stays open collects all pages that were read.
        data = np.memmap(self.file, dtype=np.uint8, mode="r")
        starts = torch.randint(len(data) - self.context, (self.batch,)).tolist()
        inputs, targets = (
            torch.stack(
                [
                    torch.from_numpy(data[first : first + self.context].astype(np.int64))
                    for first in (start + shift for start in starts)
                ]
            )
            for shift in (0, 1)
        )
        if self.device.type != "cuda":
            return inputs, targets
        inputs, targets = (
            each.pin_memory().to(self.device, non_blocking=True) for each in (inputs, targets)
        )
        return inputs, targets


def learning_rate(step: int) -> float:
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / (DECAY_STEPS - WARMUP))
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=Path, required=True, help="file of byte tokens")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    model = GPT(arguments.layers, arguments.width, arguments.heads, arguments.context).to(device)
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.99), fused=True)
    forward: Any = torch.compile(model) if arguments.compile else model
    autocast: AbstractContextManager[Any] = nullcontext()
    if device.type == "cuda":
        autocast = torch.autocast("cuda", dtype=torch.bfloat16)
    batches = Batches(arguments.tokens, arguments.batch, arguments.context, device)
    inputs, targets = batches()
    step = 0
    for line in sys.stdin:
        began = perf_counter()
        for _ in range(int(line)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            with autocast:
                loss = forward(inputs, targets)
            # The next batch is prepared while the GPU computes.
            inputs, targets = batches()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
        value = loss.item()
        print(json.dumps({"seconds": perf_counter() - began, "loss": value}), flush=True)


if __name__ == "__main__":
    main()
