"""Your own tokens, memory-mapped from a file, and a model of them. From the folder of this file:

paceline train --model own_tokens:Gru --data own_tokens:words --nproc-per-node 2 --strategy ring
"""

import itertools
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

CONTEXT = 16
VOCABULARY = ("the", "a", "dog", "cat", "dogs", "cats", "runs", "sleeps", "run", "sleep", ".")

Samples = tuple[Tensor, Tensor]


def words() -> tuple[Samples, Samples, int]:
    """Word numbers of generated sentences.

    Integers are tokens; the third value is the size of the vocabulary. Every worker maps the same
    file, and only the pages of its own batches are read.
    """
    file = Path(tempfile.gettempdir()) / "own_tokens.bin"
    if not file.exists():
        write_tokens(file)
    count = file.stat().st_size // 2
    stream = torch.from_file(str(file), shared=False, size=count, dtype=torch.uint16)
    # The targets are the tokens that follow. Both are views of the file.
    samples = (count - 1) // CONTEXT
    inputs = stream[: samples * CONTEXT].view(samples, CONTEXT)
    targets = stream[1 : samples * CONTEXT + 1].view(samples, CONTEXT)
    train, test = slice(samples * 9 // 10), slice(samples * 9 // 10, None)
    return (inputs[train], targets[train]), (inputs[test], targets[test]), len(VOCABULARY)


def write_tokens(file: Path) -> None:
    """Stands in for your tokenizer. The rename makes the file appear complete, or not at all."""
    generator = np.random.default_rng(0)
    number = {word: index for index, word in enumerate(VOCABULARY)}
    singular = [("the", "a"), ("dog", "cat"), ("runs", "sleeps"), (".",)]
    plural = [("the",), ("dogs", "cats"), ("run", "sleep"), (".",)]
    sentences = [
        [
            number[str(generator.choice(words))]
            for words in (singular, plural)[generator.integers(2)]
        ]
        for _ in range(4000)
    ]
    tokens = np.array(list(itertools.chain.from_iterable(sentences)), dtype=np.uint16)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(tokens.tobytes())
    Path(temporary.name).replace(file)


class Gru(nn.Module):
    """Scores of the next token at every position, of shape (samples, CONTEXT, classes)."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.recurrent(self.embedding(tokens))[0])
        return scores
