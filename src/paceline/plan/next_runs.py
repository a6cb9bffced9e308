"""What to run next: configurations that were not measured and are predicted to be faster.

Reports show them, so a prediction must not take long, and what cannot be predicted is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.analysis.run import Run
from paceline.errors import NoPredictionError, UsageError
from paceline.plan.advice import MIN_GAIN, command
from paceline.plan.calibration import Calibration, MeasuredRun
from paceline.plan.option_variants import CANDIDATES, is_exact, option_variants
from paceline.plan.prediction import Interval, Prediction, Predictor
from paceline.plan.recorded_job import RecordedJob, why_unplannable
from paceline.plan.run_calibration import calibrate_runs
from paceline.plan.target import Target, backend_on, measured_backend
from paceline.records import read_json

SAMPLES = 25
"""Bootstrap samples: enough for an interval, in a tenth of a second."""
MOST_RUNS = 100
"""More runs would delay a report."""


@dataclass(frozen=True, slots=True)
class NextRun:
    prediction: Prediction
    gain: Interval
    """Throughput relative to the fastest measured run, minus 1."""
    command: str


@dataclass(frozen=True, slots=True)
class NextRuns:
    fastest: MeasuredRun
    found: list[NextRun]
    """The best first."""


def next_runs(runs: Sequence[Run], comm: Sequence[Path], most: int = 3) -> NextRuns | None:
    """None if the runs cannot be planned from, or if nothing is predicted to be faster."""
    jobs = [RecordedJob(run, keeps_defaults=True) for run in runs[:MOST_RUNS]]
    try:
        records = [(str(path), read_json(path)) for path in comm]
        calibration = calibrate_runs(jobs, records)
        measured = [job.measured() for job in jobs if not why_unplannable(job)]
        fastest = max(measured, key=_throughput)
        found = _faster(calibration, measured, fastest, most)
    except UsageError:
        return None
    return NextRuns(fastest, found) if found else None


def _throughput(run: MeasuredRun) -> float:
    return run.global_samples / run.step_seconds


def _faster(
    calibration: Calibration, measured: Sequence[MeasuredRun], fastest: MeasuredRun, most: int
) -> list[NextRun]:
    known = [Target.of(run) for run in measured]
    predictor = Predictor(calibration, SAMPLES)
    ranked: dict[tuple[str, int], tuple[float, Target]] = {}
    for target in _candidates(calibration, Target.of(fastest)):
        if target in known:
            continue
        try:
            rate = target.samples / predictor.typical_step_seconds(target)
        except NoPredictionError:
            continue
        key = target.strategy, target.workers
        ranked[key] = max(ranked.get(key, (0.0, target)), (rate, target), key=lambda each: each[0])
    found = []
    for rate, target in sorted(ranked.values(), key=lambda each: -each[0])[:most]:
        if rate > (1 + MIN_GAIN) * _throughput(fastest):
            prediction = predictor.predict(target)
            gain = _relative(prediction.throughput, _throughput(fastest))
            found.append(NextRun(prediction, gain, command(calibration, target)))
    return [each for each in found if each.gain.median > MIN_GAIN]


def _relative(interval: Interval, to: float) -> Interval:
    return Interval(interval.median / to - 1, interval.low / to - 1, interval.high / to - 1)


def _candidates(calibration: Calibration, fastest: Target) -> Iterator[Target]:
    """Strategies with the same result, with as many workers, half and twice as many."""
    links = calibration.links()
    for workers in (fastest.workers, fastest.workers * 2, fastest.workers // 2):
        if workers < 1:
            continue
        if workers == 1:
            yield replace(fastest, strategy="single", workers=1, options={}, hosts=1, link=None)
            continue
        link = fastest.link or (links[0] if links else None)
        if fastest.workers == 1:
            hosts = 1 if link is None else workers
        else:
            is_spread = fastest.host_count > 1
            hosts = max(1, workers * fastest.host_count // fastest.workers) if is_spread else 1
        for strategy in CANDIDATES:
            # Only shared weights need shared memory.
            is_shared = "shared" in (strategy, fastest.strategy)
            backend = measured_backend(calibration, strategy) if is_shared else fastest.backend
            target = replace(
                fastest, strategy=strategy, workers=workers, options={}, hosts=hosts,
                link=link if hosts > 1 else None,
                backend=backend_on(backend, workers, hosts),
            )  # fmt: skip
            yield target
            if workers == fastest.workers:
                variants = option_variants(calibration, target)
                yield from (replace(target, options=each) for each in variants if _is_new(each))


def _is_new(options: Mapping[str, str]) -> bool:
    """Codecs change results, and are left to a plan."""
    return bool(options) and is_exact(options)
