"""Bits per byte of a transformer and of n-gram models on `stories`, and the grammar of its samples.

    python benchmarks/language_models.py [--model gpt-micro] [--iterations 1200] [--seeds 0,1,2]

Both kinds of models see the same training bytes and predict the same test bytes. An n-gram model
predicts a byte from the n - 1 before it, interpolated with all shorter contexts (Kneser-Ney); its
context continues over the borders of the windows, while the transformer starts each window without
one. Samples are stories from an empty prompt; the grammar's parser judges each sentence.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import paceline
from paceline.data.dataset import LoadRequest, Split
from paceline.data.stories import STORIES
from paceline.data.story_grammar import grammatical_fraction, parse
from paceline.measure.machine import hardware, software

CONTEXT = 256
"""More than the longest story."""
TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 250
ORDERS = (2, 3, 4, 5, 6, 7)
"""At most seven bytes fit into a signed integer."""
SETTINGS = {
    "data": "stories",
    "context": CONTEXT,
    "train_samples": TRAIN_SAMPLES,
    "test_samples": TEST_SAMPLES,
    "batch_size": 8,
    "eval_batch_size": 50,
    "optimizer": "muon",
    "lr": 0.006,
    "schedule": "one_cycle",
    "eval_every": "never",
}

Bytes = NDArray[np.int64]


def bits_of_ngrams(train: Bytes, test: Bytes, order: int) -> float:
    """Return the bits per byte of an n-gram model on the bytes of `test` after the first."""
    probability = np.full(len(test) - 1, 1 / 256)
    for length in range(1, order + 1):
        grams, counts = _counts(train, length, is_longest=length == order)
        once, twice = (int((counts == times).sum()) for times in (1, 2))
        discount = once / max(once + 2 * twice, 1)
        contexts, first, kinds = np.unique(grams >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        # The first bytes have no context of this length, and keep the shorter one.
        asked = _keys(test, length)[max(0, 2 - length) :]
        known = slice(len(probability) - len(asked), None)
        seen = _lookup(grams, counts - discount, asked)
        total, left = (
            _lookup(contexts, values, asked >> 8) for values in (totals, discount * kinds)
        )
        shorter = probability[known]
        mixed = (seen + left * shorter) / np.maximum(total, 1)
        probability[known] = np.where(total > 0, mixed, shorter)
    return float(-np.log2(probability).mean())


def _counts(train: Bytes, length: int, *, is_longest: bool) -> tuple[Bytes, Bytes]:
    """Return the n-grams of a length, and how often each occurs.

    A shorter one counts once for each byte that it follows: it is used where the byte before it is
    unknown.
    """
    keys = _keys(train, length)
    if not is_longest:
        keys = np.unique(_keys(train, length + 1)) & ((1 << 8 * length) - 1)
    grams, counts = np.unique(keys, return_counts=True)
    return grams, counts


def _keys(data: Bytes, order: int) -> Bytes:
    """Return each `order` consecutive bytes as one integer."""
    keys = np.zeros(len(data) - order + 1, dtype=np.int64)
    for offset in range(order):
        keys = keys << 8 | data[offset : len(data) - order + 1 + offset]
    return keys


def _lookup(sorted_keys: Bytes, values: NDArray[Any], asked: Bytes) -> NDArray[Any]:
    """Return the value of each key, 0 where there is none."""
    index = np.searchsorted(sorted_keys, asked).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[index] == asked, values[index], 0)


def _stream(split: Split) -> Bytes:
    """Return the bytes that windows were cut from."""
    return np.append(split.inputs.numpy().ravel(), split.targets.numpy()[-1, -1]).astype(np.int64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt-micro")
    parser.add_argument("--iterations", type=int, default=1200)
    parser.add_argument("--seeds", default="0,1,2", help="one run each, separated by commas")
    parser.add_argument("--threads", type=int, help="default: one per core")
    parser.add_argument("--sample-tokens", type=int, default=4000)
    arguments = parser.parse_args()
    dataset = STORIES(
        LoadRequest(train_samples=TRAIN_SAMPLES, test_samples=TEST_SAMPLES, context=CONTEXT)
    )
    cpu, torch_version = hardware()["cpu"], software()["torch"]
    print(f"{cpu}, torch {torch_version}; {TRAIN_SAMPLES * CONTEXT:,} bytes of stories\n")
    print(f"{'model':24}{'bits per byte':>15}")
    train, test = _stream(dataset.train), _stream(dataset.test)
    ngrams = {order: bits_of_ngrams(train, test, order) for order in ORDERS}
    for order, value in ngrams.items():
        print(f"{f'{order}-gram':24}{value:15.4f}", flush=True)
    results = [_train(arguments, int(seed)) for seed in arguments.seeds.split(",")]
    bits, seconds, grammatical = zip(*results, strict=True)
    print(f"{arguments.model:24}{statistics.fmean(bits):15.4f}  each: {_listed(bits, '.4f')}")
    below = [1 - each / ngrams[5] for each in bits]
    print(f"\nfewer bits than the 5-gram model: {_listed(below, '.1%')}")
    print(f"training: {_listed(seconds, '.0f')} s for {arguments.iterations} steps")
    print(f"grammatical sentences in samples: {_listed(grammatical, '.1%')}")


def _train(arguments: argparse.Namespace, seed: int) -> tuple[float, float, float]:
    """Return bits per byte, training seconds, and the grammatical fraction of samples."""
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train(
            model=arguments.model, iterations=arguments.iterations, seed=seed, out=folder,
            name="run", checkpoint_every=arguments.iterations, threads=arguments.threads,
            **SETTINGS,
        )  # fmt: skip
        if result["status"] != "finished":
            raise RuntimeError(result["cause"])
        pieces = paceline.generate(f"{folder}/run", "\n", tokens=arguments.sample_tokens)
        text = "".join(pieces).lstrip("\n")
    print(f"\n{text[:300]}...\n({len(parse(text))} sentences judged)\n")
    seconds = result["history"][-1]["seconds"]
    return result["final"]["test_loss"] / math.log(2), seconds, grammatical_fraction(text)


def _listed(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


if __name__ == "__main__":
    main()
