"""What limits a step: how the prediction changes if one part of the job or machine changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import NoPredictionError
from paceline.plan.prediction import Interval, Predictor
from paceline.plan.step_simulation import DDP_MIB
from paceline.plan.target import Target, TimeFactors
from paceline.strategies.bucket_layout import DEFAULT_MIB

SLOWDOWN = 1.3
BUCKET_MIB = {"overlap": DEFAULT_MIB, "ddp": DDP_MIB}
"""Default bucket size of the strategies that have buckets."""
BUCKET_FACTORS = (0.25, 4)


@dataclass(frozen=True, slots=True)
class Effect:
    """Of one change."""

    change: str
    step_seconds: Interval
    """Relative change: -0.1 is 10% less."""
    throughput: Interval
    """Relative change; differs from that of the step time if the batch changes."""
    is_extrapolated: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change,
            "step_seconds": self.step_seconds.to_dict(),
            "throughput": self.throughput.to_dict(),
            "extrapolated": self.is_extrapolated,
        }


@dataclass(frozen=True, slots=True)
class Sensitivity:
    target: Target
    effects: list[Effect]

    def to_dict(self) -> dict[str, Any]:
        return {
            "workers": self.target.workers,
            "strategy": self.target.strategy,
            "batch_size": self.target.samples,
            "effects": [each.to_dict() for each in self.effects],
        }


def sensitivity(predictor: Predictor, target: Target) -> Sensitivity:
    """Compare sample by sample, because the same measurements are uncertain in both predictions."""
    before = predictor.step_seconds(target)
    effects = []
    for change, other in _changes(target, predictor.calibration.gradient_bytes):
        try:
            after = predictor.step_seconds(other)
        except NoPredictionError:
            continue
        ratios = after / before
        rates = other.samples / target.samples / ratios
        effects.append(
            Effect(
                change,
                Interval.of(ratios - 1),
                Interval.of(rates - 1),
                bool(predictor.extrapolations(other)),
            )
        )
    return Sensitivity(target, effects)


def _changes(target: Target, gradient_bytes: int) -> Iterator[tuple[str, Target]]:
    yield "compute twice as fast", replace(target, factors=TimeFactors(compute=0.5))
    yield "batch x 2", replace(target, samples=2 * target.samples)
    if target.workers == 1:
        return
    yield "bandwidth x 2", replace(target, factors=TimeFactors(transfer=0.5))
    yield "latency / 2", replace(target, factors=TimeFactors(latency=0.5))
    if (size := _bucket_mib(target)) is not None:
        for other in (factor * size for factor in BUCKET_FACTORS):
            # Larger buckets than all gradients change nothing.
            if min(size, other) < gradient_bytes / 2**20:
                options = {**target.options, "bucket_mib": f"{other:g}"}
                yield f"buckets of {other:g} MiB, now {size:g}", replace(target, options=options)
    slower = replace(target, slowdown=SLOWDOWN * target.slowdown)
    yield f"one worker {SLOWDOWN:g} times slower", slower


def _bucket_mib(target: Target) -> float | None:
    """None if the strategy has no buckets."""
    default = BUCKET_MIB.get(target.strategy)
    try:
        return default and float(target.options["bucket_mib"])
    except (KeyError, ValueError):
        # A run that tunes its buckets is predicted with the default.
        return default
