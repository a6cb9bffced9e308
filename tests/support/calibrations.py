"""A calibration with exactly known parameters, for tests of predictions."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.calibration import (
    Calibration,
    CollectiveTiming,
    ComputePoint,
    Gradient,
    SizePoint,
)
from paceline.plan.links import Link

LINK = Link(1e9, 0.0)
FAST = Link(1e12, 0.0)
"""All communication takes as long as its software."""
SIZES = (4, 64, 1024, 2**20, 2**22, 2**24, 2**26)


def timing(
    operation: str,
    algorithm: str,
    latency_seconds: float,
    bytes_per_second: float,
    *,
    link: Link | None = LINK,
    backend: str = "gloo",
) -> CollectiveTiming:
    """Two workers whose time is exactly linear in the size."""
    points = tuple(
        SizePoint(size, (latency_seconds + size / bytes_per_second,) * 5) for size in SIZES
    )
    hosts = 1 if link is None else 2
    return CollectiveTiming(backend, operation, algorithm, 2, hosts, link, points)  # type: ignore[arg-type]


def point(samples: int, seconds: float, steps: int = 20) -> ComputePoint:
    """Steps with 30% of their time in the forward pass, 60% in the backward pass."""
    phases = {
        "input": 0.0,
        "forward": 0.3 * seconds,
        "backward": 0.6 * seconds,
        "update": 0.1 * seconds,
    }
    return ComputePoint(samples, phases, (seconds,) * steps)


def calibration(
    sizes_bytes: Sequence[int] = (4_000_000, 400_000, 4_000),
    collectives: Sequence[CollectiveTiming] | None = None,
    link: Link = LINK,
) -> Calibration:
    """10 ms per step plus 1 ms per sample; gradients are ready at equal distances, last first."""
    count = len(sizes_bytes)
    if collectives is None:
        collectives = [
            *(
                timing("all_reduce", algorithm, 1e-3, 100e6, link=link)
                for algorithm in ("root", "tree", "ring", "halving_doubling", "library")
            ),
            timing("reduce_scatter", "library", 0.5e-3, 200e6, link=link),
            timing("all_gather", "library", 0.5e-3, 200e6, link=link),
            timing("send_recv", "library", 0.4e-3, 110e6, link=link),
        ]
    return Calibration(
        model="lenet",
        gradients=tuple(
            Gradient(size, (count - index) / count) for index, size in enumerate(sizes_bytes)
        ),
        compute=(point(16, 0.026), point(64, 0.074)),
        residuals=((1.0,) * 20,),
        collectives=tuple(collectives),
        hardware={"cpu": "a CPU", "cores": 2},
        sources=("runs/one",),
    )
