"""What `benchmarks/gpu.py gpt` compares paceline with: bare loops and a script.

All train as many windows per step as paceline, and are kept between the rounds, so that all of
them take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config import RunConfig
from paceline.data.loading import load_dataset
from paceline.models.build import GroupedModel, build_model
from paceline.training.gpu.precision import autocast
from paceline.training.loss import cross_entropy

SCRIPT = Path(__file__).parent / "peer_scripts" / "train_gpt.py"
PEAK_FLOPS = 989e12
"""Of an H200: dense bf16, by its data sheet."""


class BareLoop:
    """The model of a configuration in a PyTorch loop: bf16, fused AdamW, data on the GPU.

    `captured`: with the whole step as one CUDA graph.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, captured: bool = False) -> None:
        dataset = load_dataset(config)
        self._model = build_model(
            config.model, dataset.sample_shape, dataset.classes, config.seed, has_tokens=True
        ).to(device)
        assert isinstance(self._model, GroupedModel)
        apart = {id(weight) for weight in self._model.undecayed_weights()}
        weights = list(self._model.parameters())
        self.parameters = sum(weight.numel() for weight in weights)
        groups: list[dict[str, Any]] = [
            {"params": [weight for weight in weights if id(weight) not in apart]},
            {"params": [weight for weight in weights if id(weight) in apart], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
            capturable=captured,
        )
        self._weights, self._batch = weights, config.global_batch_size
        self._clip_norm = config.clip_norm
        self._autocast = autocast("bf16", device)
        self._inputs = dataset.train.inputs.to(device)
        self._targets = dataset.train.targets.to(device)
        self._rows = torch.arange(self._batch, device=device)
        self._graph = torch.cuda.CUDAGraph() if captured else None
        if self._graph is not None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._step(self._rows)
            with torch.cuda.graph(self._graph, stream=stream):
                self._loss = self._step(self._rows)

    def _step(self, rows: Tensor) -> Tensor:
        self._optimizer.zero_grad()
        inputs, targets = self._inputs[rows].long(), self._targets[rows].long()
        with self._autocast:
            loss = cross_entropy(self._model(inputs), targets)
        loss.backward()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._weights, self._clip_norm)
        self._optimizer.step()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        began = perf_counter()
        order = torch.randperm(len(self._inputs), device=self._inputs.device)
        batches = order[: len(order) // self._batch * self._batch].view(-1, self._batch)
        for step in range(steps):
            rows = batches[step % len(batches)]
            if self._graph is None:
                self._loss = self._step(rows)
            else:
                self._rows.copy_(rows)
                self._graph.replay()
        # Waits for the GPU.
        self._loss.item()
        return perf_counter() - began


class PeerScript:
    """peer_scripts/train_gpt.py, for a given number of steps."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, tokens: Path, batch: int, context: int, device: str) -> Iterator[PeerScript]:
        command = [sys.executable, str(SCRIPT), f"--tokens={tokens}", f"--device={device}"]
        command += [f"--batch={batch}", f"--context={context}"]
        if device == "cpu":
            command.append("--no-compile")
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def seconds(self, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{SCRIPT.name} ended with exit code {self._process.wait()}")
        return float(json.loads(line)["seconds"])


def write_tokens(config: RunConfig, file: Path) -> None:
    """Write the training text of a configuration as bytes."""
    file.write_bytes(load_dataset(config).train.inputs.numpy().tobytes())


def flops_per_token(parameters: int, layers: int, width: int, context: int) -> float:
    """Forward and backward pass: two operations per weight, three times, and the attention."""
    return 6.0 * parameters + 12.0 * layers * width * context
