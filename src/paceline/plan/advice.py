"""Recommends strategy, options, batch size and number of workers, by time or by cost.

Candidates are predicted like any other plan. Without a gradient noise scale, the batch size stays
as it is and the fastest candidate processes the most samples per second. With one, larger batches
are candidates too: training to a loss takes 1 + noise scale / batch times as many steps
(analysis/noise_scale.py), so the fastest candidate reaches the loss first.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.noise_scale import relative_steps
from paceline.errors import NoPredictionError
from paceline.plan.calibration import Calibration
from paceline.plan.option_variants import is_exact, option_variants
from paceline.plan.prediction import Prediction, Predictor, Target

BATCH_FACTORS = (0.5, 1, 2, 4)
SCAN_SAMPLES = 20
"""Bootstrap samples of the predictions that candidates are compared by."""
MIN_GAIN = 0.02
"""An option is recommended only if it is faster than the default by this much."""


@dataclass(frozen=True, slots=True)
class Candidate:
    prediction: Prediction
    score: float
    """Relative time or cost to reach the same loss; the lowest is the best."""


@dataclass(frozen=True, slots=True)
class Advice:
    best: Prediction
    runners_up: list[tuple[Prediction, float]]
    """Others, the best first, and how much more time or money they take, as a share."""
    price_per_worker_hour: float | None
    """None: by time."""
    limit: str
    """What most of a step is spent on: compute or communication."""
    command: str
    codec: tuple[Prediction, float] | None = None
    """The best candidate with a codec, and how much time or money it saves, as a share; None if
    no codec was measured, or if none saves MIN_GAIN."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.to_dict(),
            "runners_up": [{**each.to_dict(), "excess": more} for each, more in self.runners_up],
            "by": "time" if self.price_per_worker_hour is None else "cost",
            "limit": self.limit,
            "command": self.command,
            "codec": self.codec and {**self.codec[0].to_dict(), "saving": self.codec[1]},
        }


def advise(
    calibration: Calibration,
    targets: Sequence[Target],
    price_per_worker_hour: float | None = None,
    runners_up: int = 3,
) -> Advice:
    """Choose among targets, and variants of them with other options and batch sizes."""
    scan, predictor = Predictor(calibration, SCAN_SAMPLES), Predictor(calibration)
    found: list[Candidate] = []
    error: NoPredictionError | None = None
    for target in _variants(calibration, targets):
        try:
            prediction = scan.predict(target)
        except NoPredictionError as missing:
            error = error or missing
            continue
        found.append(Candidate(prediction, _score(calibration, prediction, price_per_worker_hour)))
    has_exact = any(is_exact(each.prediction.target.options) for each in found)
    if not found:
        raise error or NoPredictionError("cannot recommend: choose other --strategy or --workers")
    ranked = sorted(
        (each for each in found if is_exact(each.prediction.target.options) or not has_exact),
        key=_rank,
    )
    best = ranked[0]
    others: dict[tuple[str, int, int], Candidate] = {}
    for each in ranked:
        target = each.prediction.target
        others.setdefault((target.strategy, target.workers, target.samples), each)
    own = best.prediction.target
    del others[own.strategy, own.workers, own.samples]
    chosen = predictor.predict(own)
    exposed = chosen.exposed_communication.median
    return Advice(
        chosen,
        [
            (predictor.predict(each.prediction.target), each.score / best.score - 1)
            for each in sorted(others.values(), key=lambda each: each.score)[:runners_up]
        ],
        price_per_worker_hour,
        "communication" if exposed > 0.5 else "compute",
        command(calibration, own),
        _with_codec(found, best, predictor),
    )


def _with_codec(
    found: Sequence[Candidate], best: Candidate, predictor: Predictor
) -> tuple[Prediction, float] | None:
    """The best candidate with a codec, if it is clearly better."""
    encoded = [each for each in found if not is_exact(each.prediction.target.options)]
    if not encoded or not is_exact(best.prediction.target.options):
        return None
    fastest = min(encoded, key=lambda each: each.score)
    saving = 1 - fastest.score / best.score
    return (predictor.predict(fastest.prediction.target), saving) if saving > MIN_GAIN else None


def _rank(candidate: Candidate) -> float:
    """The default options win unless others are clearly better."""
    has_options = bool(candidate.prediction.target.options)
    return candidate.score * (1 + MIN_GAIN if has_options else 1)


def _variants(calibration: Calibration, targets: Sequence[Target]) -> Iterator[Target]:
    for target in targets:
        sizes = {target.samples}
        if calibration.noise_scale is not None and target.scaling == "strong":
            sizes = {round(target.samples * factor) for factor in BATCH_FACTORS}
        for samples, each in itertools.product(sorted(sizes), option_variants(calibration, target)):
            if samples >= target.workers:
                yield Target(
                    target.strategy, target.workers, samples, each, target.hosts, target.link,
                    target.backend, target.scaling, target.slowdown, target.racks,
                )  # fmt: skip


def _score(calibration: Calibration, prediction: Prediction, price: float | None) -> float:
    target = prediction.target
    seconds = prediction.step_seconds.median
    if calibration.noise_scale is None:
        # The same number of samples for every candidate.
        time = seconds / target.samples
    else:
        time = seconds * relative_steps(target.samples, calibration.noise_scale)
    return time if price is None else time * target.workers * price


def command(calibration: Calibration, target: Target) -> str:
    """The command that trains as recommended."""
    words = ["paceline", "train", "--model", calibration.model]
    words += ["--strategy", target.strategy if target.workers > 1 else "single"]
    for key, value in target.options.items():
        words += ["-o", f"{key}={value}"]
    words += ["--batch-size", str(target.samples)]
    if target.host_count > 1:
        words += ["--nnodes", str(target.host_count)]
    if (per_host := target.workers // target.host_count) > 1:
        words += ["--nproc-per-node", str(per_host)]
    base = calibration.learning_batch_size
    if calibration.noise_scale is not None and base and target.samples != base:
        words += ["--lr-scaling", "sqrt", "--base-batch-size", str(base)]
    return shlex.join(words)
