"""Time codecs as one of the workers: encoding and decoding, without communication.

The time of decoding depends on the number of workers if every payload is decoded, so each codec is
timed as among several numbers of workers. All workers compute at once, as in training, and a sample
is the slowest worker's. Gradients are matrices, which codecs may compress.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.communicator import Communicator
from paceline.commbench.spec import BenchmarkSpec
from paceline.compression import create
from paceline.compression.timing import exchange_seconds

WORLD_SIZES = (2, 8)
MIN_REPEATS, MAX_REPEATS = 3, 20

Slowest = Callable[[Communicator, Sequence[float]], list[float]]


@dataclass(slots=True)
class CodecTiming:
    """The samples of a codec, with default options, at one size."""

    codec: str
    workers: int
    """That the payloads are decoded of."""
    size_bytes: int
    """Of the float32 gradient."""
    shape: tuple[int, int]
    """Of the gradient."""
    samples: list[float] = field(default_factory=list)


def matrix_shape(elements: int) -> tuple[int, int]:
    """Of the matrix with this number of elements that is the closest to a square."""
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    return rows, elements // rows


def time_codecs(
    spec: BenchmarkSpec, control: Communicator, device: torch.device, slowest: Slowest
) -> list[CodecTiming]:
    """Time all codecs at all sizes. Collective; the result is the same on every worker."""
    timings: list[CodecTiming] = []
    for name in spec.codecs:
        for workers in WORLD_SIZES:
            for size in spec.sizes:
                timing = CodecTiming(name, workers, size, matrix_shape(max(1, size // 4)))
                _time(timing, spec, control, device, slowest)
                timings.append(timing)
                if min(timing.samples) > spec.most_seconds:
                    break
    return timings


def _time(
    timing: CodecTiming,
    spec: BenchmarkSpec,
    control: Communicator,
    device: torch.device,
    slowest: Slowest,
) -> None:
    codec = create(timing.codec, {})
    random = torch.Generator().manual_seed(0)
    gradient = torch.randn(math.prod(timing.shape), generator=random).to(device)
    scratch = torch.empty_like(gradient)

    def sample() -> float:
        return exchange_seconds(codec, scratch.copy_(gradient), timing.workers, [timing.shape])

    sample()  # The first allocates memory.
    control.barrier().wait()
    (seconds,) = slowest(control, [sample()])
    affordable = int(spec.seconds / max(seconds, 1e-9))
    repeats = spec.repeats or min(max(MIN_REPEATS, affordable), MAX_REPEATS)
    control.barrier().wait()
    timing.samples = slowest(control, [sample() for _ in range(repeats)])
