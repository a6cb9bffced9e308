"""Chooses the bucket size from measurements of the first steps.

These steps alternate between one bucket, which is reduced after the backward pass, and buckets of
the default size, which overlap it. They show when each gradient is ready, and how fast the link is
alone and next to the computation. From that, `predict` simulates a step with any other size.

Good sizes differ by less than the noise of a few steps. Another size replaces the default only if
its prediction is clearly better, and one bucket only if it was faster in every pair of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_json
from paceline.strategies.bucket_layout import DEFAULT_MIB, ONE_BUCKET_MIB, split

SIZES_MIB = (0.5, 1.0, DEFAULT_MIB, 4.0, 8.0, 16.0, 32.0)
ROUNDS = 3
"""Steps with each of the two layouts."""
PROBES = 5
LEAST_GAIN = 0.05
"""Of the time from the start of the backward pass to the last sum."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of one rank, in seconds since the start of its backward pass."""

    backward: float
    copies: float
    """Of the backward pass: copying gradients to buckets."""
    ready: Sequence[float]
    """When each gradient was ready, in the order of the gradients."""
    exchanges: Sequence[tuple[int, float, float]]
    """Bytes, begin and end of the all-reduce of each bucket."""

    @property
    def total(self) -> float:
        return max(self.backward, *(end for _, _, end in self.exchanges))


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the measured steps show; an entry of result.json."""

    backward_seconds: float
    ready_seconds: list[float]
    """When each gradient is ready, in the order of the gradients."""
    copy_seconds_per_byte: float
    latency_seconds: float
    seconds_per_byte: float
    """Of an all-reduce after the backward pass."""
    overlapped_seconds_per_byte: float
    """Of an all-reduce during the backward pass."""
    one_bucket_seconds: list[float]
    default_seconds: list[float]
    """Per step with each layout: from the start of the backward pass to the last sum."""

    @classmethod
    def merge(cls, ranks: Sequence[Measurements]) -> Measurements:
        """Combine the ranks. All wait for the slowest one, whose own transfers do not wait."""
        return cls(
            max(rank.backward_seconds for rank in ranks),
            [*map(max, zip(*(rank.ready_seconds for rank in ranks), strict=True))],
            max(rank.copy_seconds_per_byte for rank in ranks),
            min(rank.latency_seconds for rank in ranks),
            min(rank.seconds_per_byte for rank in ranks),
            min(rank.overlapped_seconds_per_byte for rank in ranks),
            [*map(max, zip(*(rank.one_bucket_seconds for rank in ranks), strict=True))],
            [*map(max, zip(*(rank.default_seconds for rank in ranks), strict=True))],
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A bucket size and why it was chosen."""

    bucket_mib: float
    reason: str
    measurements: Measurements | None = None
    predicted_seconds: Mapping[str, float] | None = None
    """For each size in MiB: from the start of the backward pass to the last sum."""


class BucketTuner:
    """Measures the first steps of a run and chooses the bucket size."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    @property
    def is_complete(self) -> bool:
        return len(self._steps) == 2 * ROUNDS

    @property
    def bucket_mib(self) -> float:
        """The bucket size of the next step."""
        return DEFAULT_MIB if len(self._steps) % 2 else ONE_BUCKET_MIB

    def add(self, step: StepTimes) -> None:
        self._steps.append(step)

    def choose(
        self, communicator: Communicator, weights: Sequence[nn.Parameter], first_mib: float
    ) -> Choice:
        """Return the same choice on all ranks. Collective.

        `weights` are in the order of their gradients.
        """
        latency = probe_latency(communicator, weights[0].device)
        own = measurements_of(self._steps[::2], self._steps[1::2], latency)
        ranks = gather_json(communicator, asdict(own))
        merged = ranks and asdict(Measurements.merge([Measurements(**rank) for rank in ranks]))
        # All ranks choose from the same numbers.
        measurements = Measurements(**broadcast_json(communicator, merged))
        return choose(measurements, weights, first_mib)


def measurements_of(
    one: Sequence[StepTimes], several: Sequence[StepTimes], latency_seconds: float
) -> Measurements:
    """Summarize the steps of one rank with one bucket and with several."""
    alone = statistics.median(
        max(0.0, end - begin - latency_seconds) / size
        for step in one
        for size, begin, end in step.exchanges
    )
    overlapped = [*_overlapped_exchanges(several)]
    busy = sum(max(0.0, seconds - latency_seconds) for _, seconds in overlapped)
    return Measurements(
        statistics.median(step.backward for step in several),
        [*map(statistics.median, zip(*(step.ready for step in several), strict=True))],
        statistics.median(step.copies / step.exchanges[0][0] for step in one),
        latency_seconds,
        alone,
        busy / sum(size for size, _ in overlapped) if overlapped else alone,
        [step.total for step in one],
        [step.total for step in several],
    )


def _overlapped_exchanges(steps: Iterable[StepTimes]) -> Iterable[tuple[int, float]]:
    """Return bytes and duration of each all-reduce that ended during the backward pass."""
    for step in steps:
        free = 0.0
        for size, begin, end in step.exchanges:
            if end <= step.backward:
                yield size, end - max(begin, free)
            free = max(free, end)


def probe_latency(communicator: Communicator, device: torch.device) -> float:
    """Return the duration of an all-reduce of one element. Collective."""
    seconds = []
    for _ in range(PROBES):
        began = perf_counter()
        communicator.all_reduce(torch.zeros(1, device=device), "control").wait()
        communicator.synchronize()
        seconds.append(perf_counter() - began)
    # The first one also waits for the other ranks.
    return min(seconds[1:])


def choose(measured: Measurements, weights: Sequence[nn.Parameter], first_mib: float) -> Choice:
    """Return the bucket size for measurements; weights are in the order of their gradients."""
    sizes = [weight.nbytes for weight in weights]
    layouts = {size: split(sizes, range(len(sizes)), first_mib, size) for size in SIZES_MIB}
    predicted = {size: predict(measured, sizes, layout) for size, layout in layouts.items()}
    best = min(SIZES_MIB, key=lambda size: (predicted[size], len(layouts[size])))
    default = predicted[DEFAULT_MIB]
    pairs = zip(measured.one_bucket_seconds, measured.default_seconds, strict=True)
    if all(one < (1 - LEAST_GAIN) * several for one, several in pairs):
        chosen, reason = ONE_BUCKET_MIB, "overlap did not pay in any measured pair of steps"
    elif predicted[best] < (1 - LEAST_GAIN) * default:
        gain = 1 - predicted[best] / default
        chosen, reason = best, f"predicted {gain:.0%} faster than {DEFAULT_MIB:g} MiB"
    else:
        chosen = DEFAULT_MIB
        reason = f"no other size is predicted to be {LEAST_GAIN:.0%} faster"
    return Choice(chosen, reason, measured, {f"{size:g}": predicted[size] for size in SIZES_MIB})


def predict(measured: Measurements, sizes: Sequence[int], layout: Sequence[Sequence[int]]) -> float:
    """Return the seconds from the start of the backward pass to the last sum.

    `sizes` are the bytes of each gradient in order, `layout` the positions in each bucket. The link
    transfers one bucket after the other, at different rates during and after the backward pass.
    """
    now, backward = 0.0, measured.backward_seconds
    copied = 0.0
    for bucket in layout:
        size = float(sum(sizes[position] for position in bucket))
        copied += size if len(bucket) > 1 else 0.0
        ready = max(measured.ready_seconds[position] for position in bucket)
        now = max(now, ready) + measured.latency_seconds
        if now < backward and (rate := measured.overlapped_seconds_per_byte) > 0:
            overlapped = min(size, (backward - now) / rate)
            now += overlapped * rate
            size -= overlapped
        now += size * measured.seconds_per_byte
    return max(backward, now) + copied * measured.copy_seconds_per_byte
