"""Corrections: costs of a strategy that the model leaves out, from runs on the same link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.errors import NoPredictionError
from paceline.plan.calibration import MeasuredRun
from paceline.plan.codec_cost import without_codec
from paceline.plan.collective_times import Place
from paceline.plan.compute_times import FEWEST_RUNS, LEAST_DEVIATION, PHASE_DEVIATION
from paceline.plan.step_simulation import STRATEGIES
from paceline.plan.target import Target

LEAST_CORRECTION = 0.25
"""Beyond this, the run was disturbed or is not what the model describes."""
LEAST_SPREAD = 0.1
"""Relative standard deviation of the correction of a strategy without runs."""
MOST_DEVIATION = 0.5
"""Of a correction; a run with more says nothing about software."""
SIZE_OPTIONS = ("bucket_mib", "first_bucket_mib", "every", "tau", "servers", "place")
"""Options that the model covers: runs that differ in them have the same correction."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Factor on the software's part of all collectives."""

    factor: float
    deviation: float
    """Relative standard deviation."""


class Corrections:
    """Corrections by the runs of a calibration; each run is fitted once."""

    def __init__(
        self,
        runs: Sequence[MeasuredRun],
        exchange_seconds: Callable[[MeasuredRun, float], float],
        measured_exchange: Callable[[MeasuredRun], float],
    ) -> None:
        """`exchange_seconds` is the model's for a run, with a factor on its software."""
        self._runs, self._exchange_seconds = runs, exchange_seconds
        self._measured_exchange = measured_exchange
        self._known: dict[int, Correction | None] = {}
        """By index of the run; None if the model has no prediction for it."""

    def of(self, target: Target) -> Correction:
        """Factor on the software of collectives that makes the model exact for runs on the link.

        From runs of the same strategy with the most similar number of workers, with the same
        options if there are any. It is drawn towards 1: the more, the less sure it is. Without runs
        of the strategy it is the median over all strategies, and their spread is its uncertainty.
        """
        fitted = [
            (run, correction)
            for run in self._runs
            if run.workers > 1
            and run.strategy in STRATEGIES
            and Place(run.backend, run.hosts > 1, run.link) == target.place
            # Shared weights are no collective of the communicator.
            and (run.strategy == "shared") == (target.strategy == "shared")
            and (correction := self._of_run(run)) is not None
        ]
        form = _form(target.strategy, target.options)
        plain = form[0], without_codec(form[1])
        same = [one for one in fitted if _form(one[0].strategy, one[0].options) == form] or [
            one for one in fitted if _form(one[0].strategy, one[0].options) == plain
        ]
        same = [one for one in same if dict(one[0].options) == dict(target.options)] or same
        distances = [abs(math.log(run.workers / target.workers)) for run, _ in same]
        nearest = [
            correction
            for (_, correction), distance in zip(same, distances, strict=True)
            if distance <= min(distances) + 1e-9
        ]
        if not fitted:
            return Correction(1.0, 0.0)
        return shrunk_correction(nearest, [correction for _, correction in fitted])

    def _of_run(self, run: MeasuredRun) -> Correction | None:
        key = self._runs.index(run)
        if key not in self._known:
            self._known[key] = None
            with suppress(NoPredictionError):
                self._known[key] = self._fit(run)
        return self._known[key]

    def _fit(self, run: MeasuredRun) -> Correction:
        """By bisection, from the exchange phase, which compute times do not disturb."""
        measured = self._measured_exchange(run)
        low, high = LEAST_CORRECTION, 1 / LEAST_CORRECTION
        for _ in range(30):
            middle = math.sqrt(low * high)
            is_long = self._exchange_seconds(run, middle) > measured
            low, high = (low, middle) if is_long else (middle, high)
        factor = math.sqrt(low * high)
        found, more = (self._exchange_seconds(run, each) for each in (factor, 1.1 * factor))
        # What varies of the exchange is attributed to software. The link varies less.
        software = max((more - found) / 0.1, 1e-9)
        of_link = LEAST_DEVIATION * max(measured - software, 0.0)
        varying = (run.deviation * measured, PHASE_DEVIATION * software, of_link)
        deviation = math.hypot(*varying) / software
        return Correction(factor, deviation)


def shrunk_correction(own: Sequence[Correction], everything: Sequence[Correction]) -> Correction:
    """The mean of `own`, drawn towards 1: what `paceline comm` measured, without a correction.

    The less sure it is, the more; a plan from few runs reproduces them. Without `own`, the median
    of all runs that say something about software, with their spread as its uncertainty.
    """
    telling = [each for each in everything if each.deviation < MOST_DEVIATION] or everything
    if not own:
        logs = np.log([each.factor for each in telling])
        return Correction(math.exp(float(np.median(logs))), max(float(np.std(logs)), LEAST_SPREAD))
    mean = fmean(math.log(each.factor) for each in own)
    deviation = math.sqrt(math.fsum(each.deviation**2 for each in own)) / len(own)
    if len(everything) < FEWEST_RUNS:
        return Correction(math.exp(mean), min(deviation, MOST_DEVIATION))
    weight = MOST_DEVIATION**2 / (MOST_DEVIATION**2 + deviation**2)
    return Correction(math.exp(weight * mean), deviation * math.sqrt(weight))


Form = tuple[str, dict[str, str]]


def _form(strategy: str, options: Mapping[str, str]) -> Form:
    return strategy, {key: value for key, value in options.items() if key not in SIZE_OPTIONS}
