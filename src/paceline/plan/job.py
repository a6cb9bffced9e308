"""A training job on some number of workers, as step simulations see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.plan.calibration import Gradient
from paceline.plan.codec_cost import CodecCost
from paceline.plan.collective_cost import NO_TIME, CollectiveTime
from paceline.plan.collective_times import Place
from paceline.plan.host_levels import levels_of

Collective = Callable[[str, str, float], CollectiveTime]
"""Time of a collective, by operation, algorithm and bytes."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Seconds of one step of the slowest worker."""

    input: float
    forward: float
    backward: float
    update: float

    @property
    def seconds(self) -> float:
        return self.input + self.forward + self.backward + self.update

    def scaled(self, factor: float) -> Compute:
        return Compute(
            *(factor * each for each in (self.input, self.forward, self.backward, self.update))
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What one step computes and exchanges."""

    strategy: str
    options: Mapping[str, str]
    workers: int
    hosts: int
    gradients: Sequence[Gradient]
    optimizer_state_bytes: int
    compute: Compute
    collective: Collective
    local_factor: float = 1.0
    """Compute time of the slowest worker over several local steps, relative to `compute`."""
    codec: CodecCost | None = None
    backend: str = "gloo"
    """As in CollectiveTiming."""
    concurrent_slowdown: float = 1.0
    """Of the software of collectives that are in progress at once."""
    launch_seconds: float = 0.0
    """Of all collectives that start during the passes."""
    contention: float = 0.0
    """Slowdown of the backward pass while a collective is in progress: at 0.5, it takes 1.5 times
    as long."""

    @property
    def gradient_bytes(self) -> int:
        return _total_bytes(self.gradients)

    def reduction(self, algorithm: str, gradients: Sequence[Gradient]) -> CollectiveTime:
        """Time of the sum of these gradients at once, which the codec encodes."""
        if self.codec is None:
            return self.collective("all_reduce", algorithm, _total_bytes(gradients))
        wire = self.codec.wire_bytes(gradients)
        times = [self.collective("all_reduce", algorithm, size) for size in wire.sums]
        times += [
            self.collective("all_gather", "library", size * self.workers) for size in wire.gathers
        ]
        encoding = replace(NO_TIME, codec_seconds=self.codec.seconds(gradients, self.workers))
        return sum(times, encoding)

    def reduction_bytes(self, algorithm: str, gradients: Sequence[Gradient]) -> float:
        """Bytes of such a sum in one direction of the busiest link."""
        if self.codec is None:
            return self.link_bytes("all_reduce", algorithm, _total_bytes(gradients))
        wire = self.codec.wire_bytes(gradients)
        sizes = [self.link_bytes("all_reduce", algorithm, size) for size in wire.sums]
        sizes += [
            self.link_bytes("all_gather", "library", size * self.workers) for size in wire.gathers
        ]
        return math.fsum(sizes)

    def link_bytes(self, operation: str, algorithm: str, size_bytes: float) -> float:
        """Bytes of a collective in one direction of the busiest link, if there are several hosts;
        on one host, of the busiest worker."""
        place = Place(self.backend, self.hosts > 1, None)
        levels = levels_of(operation, algorithm, self.workers, self.hosts, size_bytes, place)
        return math.fsum(
            each.one_way_bytes
            for level in levels
            if level.place.is_across_hosts == place.is_across_hosts
            for each in level.rounds
        )

    def option(self, name: str, default: float) -> float:
        text = self.options.get(name)
        return default if text in (None, "auto", "measured", "none") else float(text)


def _total_bytes(gradients: Sequence[Gradient]) -> int:
    return sum(each.size_bytes for each in gradients)


@dataclass(frozen=True, slots=True)
class StepTime:
    seconds: float
    compute_seconds: float
    """Of the slowest worker."""
    exchange_seconds: float
    """Exposed communication."""
    hidden_seconds: float = 0.0
    """Overlapped communication."""
    link_bytes: float = 0.0
    """That the busiest link carries in one direction."""
