"""Recommends strategy, options, batch size and number of workers, by time or by cost.

Candidates are predicted like any other plan. Without a gradient noise scale whose interval is
known, the batch size stays as it is and the fastest candidate processes the most samples per
second. With one, other batch sizes are candidates too (batch_size.py), and the fastest candidate
reaches the loss first.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import cluster_spec, to_argv
from paceline.errors import NoPredictionError
from paceline.plan.batch_size import BatchAdvice, advise_batch, batch_sizes
from paceline.plan.calibration import Calibration
from paceline.plan.links import Link, link_of_cluster
from paceline.plan.option_variants import is_exact, option_variants
from paceline.plan.prediction import Prediction, Predictor
from paceline.plan.step_simulation import algorithm_of
from paceline.plan.target import Target

SCAN_SAMPLES = 20
"""Bootstrap samples of the predictions that candidates are compared by."""
MIN_GAIN = 0.05
"""Of an option over the default, and of an algorithm that was not measured over one that was:
smaller gains are within the error of predictions."""


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
    batch: BatchAdvice | None = None
    """None if the batch size was not to be chosen."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "best": self.best.to_dict(),
            "runners_up": [{**each.to_dict(), "excess": more} for each, more in self.runners_up],
            "by": "time" if self.price_per_worker_hour is None else "cost",
            "limit": self.limit,
            "command": self.command,
            "codec": self.codec and {**self.codec[0].to_dict(), "saving": self.codec[1]},
            "batch": None if self.batch is None else self.batch.to_dict(),
        }


class _Scan:
    """Predictions with few bootstrap samples, which candidates are compared by."""

    def __init__(self, calibration: Calibration, price_per_worker_hour: float | None) -> None:
        self.found: list[Candidate] = []
        self._calibration, self._price = calibration, price_per_worker_hour
        self._predictor = Predictor(calibration, SCAN_SAMPLES)
        self._error: NoPredictionError | None = None

    def add(self, variants: Iterable[Target]) -> list[Candidate]:
        """Predict variants, and return those that can be predicted."""
        added = []
        for variant in variants:
            try:
                prediction = self._predictor.predict(variant)
            except NoPredictionError as missing:
                self._error = self._error or missing
                continue
            score = _score(self._calibration, prediction, self._price)
            added.append(Candidate(prediction, score))
        self.found += added
        return added

    def ranked(self, *, has_codecs: bool) -> list[Candidate]:
        """The best first."""
        found = [
            each for each in self.found if has_codecs or is_exact(each.prediction.target.options)
        ]
        if not found:
            raise self._error or NoPredictionError(
                "cannot recommend: choose other --strategy or --workers"
            )
        return sorted(found, key=self._rank)

    def _rank(self, candidate: Candidate) -> float:
        """Default options and measured algorithms win unless others are clearly better."""
        target = candidate.prediction.target
        is_usual = not target.options and self._is_measured(target)
        return candidate.score * (1 if is_usual else 1 + MIN_GAIN)

    def _is_measured(self, target: Target) -> bool:
        """Whether a run or a collective shows the algorithm of the strategy."""
        if target.workers == 1:
            return True
        runs, collectives = self._calibration.runs, self._calibration.collectives
        known = {algorithm_of(run.strategy, run.options) for run in runs if run.workers > 1}
        known |= {timing.algorithm for timing in collectives if timing.operation == "all_reduce"}
        return algorithm_of(target.strategy, target.options) in known


def advise(
    calibration: Calibration,
    targets: Sequence[Target],
    price_per_worker_hour: float | None = None,
    runners_up: int = 3,
) -> Advice:
    """Choose among targets, and variants of them with other options and batch sizes.

    Codecs change the result of training: they are recommended if targets have one, and are a remark
    otherwise.
    """
    scan, predictor = _Scan(calibration, price_per_worker_hour), Predictor(calibration)
    by_batch: dict[tuple[str, int], list[Candidate]] = {}
    for target in targets:
        sized = scan.add(_with_batch_sizes(calibration, target))
        if sized:
            by_batch[target.strategy, target.workers] = sized
            fastest = min(sized, key=lambda one: one.score).prediction.target
            scan.add(_with_options(calibration, fastest))
    ranked = scan.ranked(has_codecs=not all(is_exact(target.options) for target in targets))
    best = ranked[0]
    others: dict[tuple[str, int], Candidate] = {}
    for each in ranked:
        others.setdefault((each.prediction.target.strategy, each.prediction.target.workers), each)
    own = best.prediction.target
    del others[own.strategy, own.workers]
    chosen = predictor.predict(own)
    batch = None
    if (learning := calibration.learning_with_interval) is not None and own.scaling == "strong":
        sizes = [one.prediction for one in by_batch[own.strategy, own.workers]]
        base = None
        with suppress(NoPredictionError):
            base = predictor.predict(replace(own, samples=learning.batch_size))
        batch = advise_batch(learning, chosen, base, sizes)
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
        _with_codec(scan.found, best, predictor),
        batch,
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


def _with_batch_sizes(calibration: Calibration, target: Target) -> Iterator[Target]:
    sizes = [target.samples]
    if (learning := calibration.learning_with_interval) is not None and target.scaling == "strong":
        sizes = batch_sizes(learning, target.samples, target.workers)
    for samples in sizes:
        yield replace(target, samples=samples)


def _with_options(calibration: Calibration, target: Target) -> Iterator[Target]:
    for options in option_variants(calibration, target):
        if options != target.options:
            yield replace(target, options=options)


def _score(calibration: Calibration, prediction: Prediction, price: float | None) -> float:
    target = prediction.target
    seconds = prediction.step_seconds.median
    if (learning := calibration.learning_with_interval) is None:
        # The same number of samples for every candidate.
        time = seconds / target.samples
    else:
        time = seconds * learning.relative_steps(target.samples)
    return time if price is None else time * target.workers * price


def command(calibration: Calibration, target: Target) -> str:
    """The command that trains as recommended."""
    if calibration.script is not None:
        return _script_command(calibration, target)
    words = ["paceline", "train", "--model", calibration.model, *to_argv(calibration.settings)]
    words += ["--strategy", target.strategy if target.workers > 1 else "single"]
    for key, value in target.options.items():
        words += ["-o", f"{key}={value}"]
    words += ["--batch-size", str(target.samples)]
    if (cluster := _cluster(calibration, target.link)) is not None:
        words += ["--cluster", f"nodes={target.host_count},{cluster}"]
    elif target.host_count > 1:
        words += ["--nnodes", str(target.host_count)]
    if (per_host := target.workers // target.host_count) > 1:
        words += ["--nproc-per-node", str(per_host)]
    if target.backend in ("shm", "hierarchical") and target.strategy != "shared":
        words += ["--communicator", "hierarchical"]
    learning = calibration.learning_with_interval
    if learning is not None and (rate := learning.scaled_rate(target.samples)) is not None:
        words += ["--lr", f"{rate:.3g}"]
    return shlex.join(words)


def _cluster(calibration: Calibration, link: Link | None) -> str | None:
    """The emulated nodes of the runs on this link; None if there are none."""
    for text in calibration.clusters:
        spec = cluster_spec.parse_recorded(f"nodes={cluster_spec.MOST_NODES},{text}")
        if link in (None, link_of_cluster(spec)):
            return text
    return None


def _script_command(calibration: Calibration, target: Target) -> str:
    """What starts the script, and as a comment what to change in it.

    Its arguments are those of the run with the most similar batch.
    """
    wanted, known = target.samples_of_worker, calibration.script_words
    nearest = min(known, key=lambda samples: abs(int(samples) - wanted), default=None)
    program = [calibration.script or ""] if nearest is None else known[nearest]
    words = ["torchrun", "--nproc-per-node", str(target.workers // target.host_count), *program]
    if target.host_count > 1:
        words[1:1] = ["--nnodes", str(target.host_count)]
    changes = [f"{wanted} samples per worker"]
    if target.workers > 1 and target.strategy == "ddp" and "bucket_mib" in target.options:
        changes.append(f"bucket_cap_mb={target.options['bucket_mib']}")
    elif target.workers > 1 and target.strategy != "ddp":
        options = "".join(f", {key}={value!r}" for key, value in target.options.items())
        changes.append(f"paceline.join({target.strategy!r}{options})")
    return f"{shlex.join(words)}  # {', '.join(changes)}"
