"""User-defined data, models and strategies: small, and faulty on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.connection import Connection
from paceline.errors import UsageError
from paceline.strategies.parameter_server.strategy import ParameterServer
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import MakeOptimizer, Strategy
from paceline.training.rank_report import weights_sha256

Samples = tuple[Tensor, Tensor]

FEATURES = 8
CLASSES = 3


def data() -> tuple[Samples, Samples]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (96,), generator=generator)
    labels[:CLASSES] = torch.arange(CLASSES)
    return (inputs, labels), (inputs[:24], labels[:24])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class NextToken(nn.Module):
    """Predicts the next token from this one and the mean of the earlier ones."""

    def __init__(self, sample_shape: tuple[int, ...], classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.layers = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh())
        self.head = nn.Linear(width, classes)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).unsqueeze(1)
        means = embedded.cumsum(1) / counts
        logits: Tensor = self.head(self.layers(torch.cat([embedded, means], -1)))
        return logits


def word_pairs() -> tuple[Samples, Samples, int]:
    """Tokens of a vocabulary of 600, as uint16; each target is the successor of its token."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 599, (64, 5), generator=generator).to(torch.uint16)
    targets = (inputs.int() + 1).to(torch.uint16)
    return (inputs, targets), (inputs[:16], targets[:16]), 600


class Slow(Plain):
    """Each forward pass takes OWN_SLEEP_SECONDS longer."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("OWN_SLEEP_SECONDS", "0")))
        return super().forward(inputs)


class SlowOnRankOne(Plain):
    """The second training step of rank 1 takes OWN_SLEEP_SECONDS longer."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and rank() == "1":
            self._steps += 1
            if self._steps == 2:
                time.sleep(float(os.environ["OWN_SLEEP_SECONDS"]))
        return super().forward(inputs)


class SlowServers(ParameterServer):
    """The first update of a server takes OWN_SLEEP_SECONDS longer."""

    def serve(
        self, number: int, workers: Sequence[Connection], make_optimizer: MakeOptimizer
    ) -> None:
        def make_slow(weights: nn.Parameter) -> Optimizer:
            optimizer = make_optimizer(weights)

            def sleep_once(*_: object) -> None:
                handle.remove()
                time.sleep(float(os.environ["OWN_SLEEP_SECONDS"]))

            handle = optimizer.register_step_pre_hook(sleep_once)
            return optimizer

        super().serve(number, workers, make_slow)


class Wide(nn.Module):
    """Much to communicate and little to compute; waits for the first resource sample."""

    def __init__(self) -> None:
        super().__init__()
        samples = Path(os.environ["OWN_NOTES"]) / f"resources-{rank()}.jsonl"
        deadline = time.monotonic() + 60
        while not (samples.exists() and samples.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 40_000), nn.Linear(40_000, CLASSES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class Talkative(Plain):
    """Prints its rank, and writes its number of threads to OWN_NOTES."""

    def __init__(self) -> None:
        super().__init__()
        self._has_printed = False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self._has_printed:
            self._has_printed = True
            rank = os.environ.get("RANK", "0")
            sys.stdout.write(f"hello from {rank}\n")
            sys.stderr.write(f"a warning of {rank}\n")
            note = Path(os.environ["OWN_NOTES"]) / f"threads-{rank}"
            note.write_text(str(torch.get_num_threads()))
        return super().forward(inputs)


class Fingerprinted(Plain):
    """Appends a hash of its weights to a file in OWN_NOTES, at every training step."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            note = Path(os.environ["OWN_NOTES"]) / f"weights-{os.environ['RANK']}"
            with note.open("a") as file:
                file.write(weights_sha256(self.state_dict()) + "\n")
        return super().forward(inputs)


def rank() -> str:
    """Return the rank of this worker, however it was started."""
    return os.environ.get("RANK") or os.environ["SLURM_PROCID"]


class Breaking(Plain):
    """Raises an error in the fifth forward pass of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 5 and rank() == "1":
            raise ValueError("the model broke")
        return super().forward(inputs)


class Recording(Plain):
    """Records its training samples by attempt and rank; slow while OWN_NOTES/slow exists."""

    def forward(self, inputs: Tensor) -> Tensor:
        notes = Path(os.environ["OWN_NOTES"])
        if self.training and (notes / "record").exists():
            who = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}"
            with (notes / f"seen-{who}").open("a") as file:
                file.write(" ".join(f"{value:.6f}" for value in inputs[:, 0].tolist()) + "\n")
            if (notes / "slow").exists():
                time.sleep(0.1)
        return super().forward(inputs)


class FailingTwice(Plain):
    """Rank 0 raises an error, then rank 1 fails as OWN_SECOND says, with a slow clock."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._calls += 1
        mark = Path(os.environ["OWN_NOTES"]) / "failed"
        if self._calls == 5 and rank() == "0":
            mark.touch()
            raise ValueError("the first error")
        if self._calls == 5 and rank() == "1":
            self._fail_second(mark)
        return super().forward(inputs)

    def _fail_second(self, mark: Path) -> None:
        deadline = time.monotonic() + 60
        while not mark.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        # Long enough for the launcher of rank 0 to notice, and within its grace period.
        time.sleep(1.5)
        if os.environ["OWN_SECOND"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        now = time.time
        time.time = lambda: now() - 3600.0
        raise ValueError("the second error")


class Picky(Strategy):
    """Rejects every model."""

    def setup(self, replica: Replica) -> None:
        raise UsageError("--model: this strategy takes no model at all")
