"""Options of a strategy that a recommendation compares: bucket sizes and codecs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from paceline.plan.calibration import Calibration
from paceline.plan.codec_cost import plannable_codecs
from paceline.plan.step_simulation import BUCKET_STRATEGIES, PRESETS
from paceline.plan.target import Target
from paceline.strategies.bucket_layout import MIB

EXACT_STRATEGIES = (
    "overlap", "ddp", "allreduce", "ring", "halving_doubling", "tree", "gather_scatter", "sharded",
)  # fmt: skip
"""They compute what one worker computes."""
CANDIDATES = (*EXACT_STRATEGIES, "shared")
"""Unless strategies are given. Shared weights are exact, too, but have a plan on one host only."""
BUCKET_MIB = ("0.25", "1", "8", "32")
"""Bucket sizes to try, besides the default."""
CODEC_STRATEGIES = (*BUCKET_STRATEGIES, *PRESETS)


def option_variants(calibration: Calibration, target: Target) -> Iterator[Mapping[str, str]]:
    """The options of the target; if it has none, also bucket sizes and the measured codecs."""
    yield target.options
    if target.options or target.workers == 1:
        return
    if target.strategy in BUCKET_STRATEGIES:
        # Larger buckets than the model hold all of its gradients, as the default does.
        total = calibration.gradient_bytes / MIB
        yield from ({"bucket_mib": size} for size in BUCKET_MIB if float(size) < total)
    if target.strategy in CODEC_STRATEGIES:
        known = plannable_codecs(calibration.codec_timings, calibration.gradients)
        yield from ({"codec": name} for name in known)


def is_exact(options: Mapping[str, str]) -> bool:
    """Whether gradients are exchanged without a codec, which changes the result of training."""
    return options.get("codec", "none") == "none"
