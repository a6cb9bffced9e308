"""A plan: predictions for every requested number of workers, strategy and link."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import NoPredictionError, RecordsError, UsageError, suggest
from paceline.plan.advice import Advice, advise
from paceline.plan.calibration import Calibration
from paceline.plan.cluster_simulation import Day, Failures, Racks, simulate_days
from paceline.plan.codec_cost import without_codec
from paceline.plan.links import Link
from paceline.plan.option_variants import CANDIDATES, is_exact
from paceline.plan.prediction import Prediction, Predictor
from paceline.plan.run_calibration import (
    HeldOut,
    calibrate_records,
    read_measured_runs,
    read_records,
)
from paceline.plan.sensitivity import Sensitivity, sensitivity
from paceline.plan.step_simulation import STRATEGIES
from paceline.plan.strategy_options import check_options, own_options, without_defaults
from paceline.plan.target import Target, backend_on, measured_backend
from paceline.plan.validation import Check, validate
from paceline.records import SCHEMA, write_json


@dataclass(frozen=True, slots=True)
class Request:
    """What to predict; empty lists and None stand for what the calibration measured."""

    workers: Sequence[int]
    strategies: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    links: Sequence[Link] = ()
    hosts: int | None = None
    batch_size: int | None = None
    """Global batch for strong scaling, batch of a worker for weak scaling."""
    scaling: Literal["strong", "weak"] = "strong"
    slowdown: float = 1.0
    racks: Racks | None = None
    failures: Failures | None = None
    """Simulate days with these; None: not."""
    is_advice_wanted: bool = False
    price_per_worker_hour: float | None = None
    """Recommend by cost; None: by time."""
    against: Sequence[str] = ()
    """Paths of runs to compare with predictions, which are not calibrated from."""


Progress = Callable[[str], None]
"""Called with what is being done."""


@dataclass(frozen=True, slots=True)
class Plan:
    calibration: Calibration
    predictions: list[Prediction]
    skipped: list[str]
    """Why strategies could not be predicted, and runs not be planned from."""
    days: dict[int, Day]
    """Mean of the simulated days, by number of workers."""
    advice: Advice | None = None
    sensitivity: Sensitivity | None = None
    """Of the recommendation, or of the fastest prediction with several workers."""
    checks: Sequence[Check] = ()
    """Measured runs and their predictions."""
    held_out_other_processes_share: float | None = None
    """Of the CPU, that processes besides the worst held-out run used."""
    calibration_seconds: float | None = None
    """What measuring the job took; None for a plan from records."""

    def to_dict(self) -> dict[str, Any]:
        known = self.calibration
        return {
            "schema": SCHEMA,
            "kind": "plan",
            "model": known.model,
            "hardware": dict(known.hardware),
            "software": dict(known.software),
            "sources": list(known.sources),
            "calibration_seconds": self.calibration_seconds,
            "predictions": [each.to_dict() for each in self.predictions],
            "advice": None if self.advice is None else self.advice.to_dict(),
            "sensitivity": None if self.sensitivity is None else self.sensitivity.to_dict(),
            "validation": [each.to_dict() for each in self.checks],
            "days": [{"workers": count, **asdict(day)} for count, day in self.days.items()],
            "skipped": self.skipped,
        }

    def write(self, path: str) -> None:
        try:
            write_json(Path(path), self.to_dict())
        except OSError as error:
            raise RecordsError(f"cannot write {path}: {error.strerror}") from None


def make_plan(
    paths: Sequence[str],
    request: Request,
    model: str | None = None,
    progress: Progress = lambda text: None,
) -> Plan:
    """Calibrate from records and predict; UsageError if nothing can be predicted."""
    for name in request.strategies:
        if name not in STRATEGIES and name != "single":
            raise UsageError(f"--strategy: no plan for {name!r}: {suggest(name, STRATEGIES)}")
    progress("reading the runs")
    records = read_records(paths)
    calibration = calibrate_records(records, model)
    held_out = HeldOut([], None)
    if request.against:
        held_out = read_measured_runs(request.against, calibration)
    candidates = [*(request.strategies or CANDIDATES)] if request.is_advice_wanted else []
    check_options([*_strategies(calibration, request, 2), *candidates], request.options)
    if not is_exact(request.options):
        # A codec that was asked for is not silently left out.
        candidates = [one for one in candidates if "codec" in own_options(one, request.options)]
    predictor = Predictor(calibration)
    links: Sequence[Link | None] = [*request.links] or [*calibration.links()] or [None]
    found, skipped = _predict_all(predictor, request, links, progress)
    failures = request.failures
    days = {} if failures is None else {n: simulate_days(n, failures) for n in request.workers}
    advice = None
    if request.is_advice_wanted:
        progress("comparing strategies")
        targets = [
            _target(calibration, request, name, workers, links[0])
            for workers in request.workers
            for name in (candidates if workers > 1 else ["single"])
        ]
        if is_exact(request.options):
            # A codec of the runs is recommended only if it was asked for.
            targets = [replace(each, options=without_codec(each.options)) for each in targets]
        advice = advise(calibration, targets, request.price_per_worker_hour)
    progress("comparing with measured runs")
    checks = validate(calibration, held_out.runs)
    progress("changing one thing at a time")
    limits = sensitivity(predictor, _to_explain(found, advice))
    skipped += records.notes
    busy = held_out.other_processes_share
    return Plan(calibration, found, skipped, days, advice, limits, checks, busy)


def _to_explain(found: Sequence[Prediction], advice: Advice | None) -> Target:
    """The recommendation or the fastest prediction; of several workers, unless there is none."""
    if advice is not None and advice.best.target.workers > 1:
        return advice.best.target
    several = [each for each in found if each.target.workers > 1] or found
    return max(several, key=lambda each: each.throughput.median).target


def _predict_all(
    predictor: Predictor,
    request: Request,
    links: Sequence[Link | None],
    progress: Progress,
) -> tuple[list[Prediction], list[str]]:
    """Predictions, and why others could not be made; the first reason is raised if none could."""
    calibration = predictor.calibration
    found: list[Prediction] = []
    skipped: dict[str, NoPredictionError] = {}
    targets = [
        _target(calibration, request, strategy, workers, link)
        for link in links
        for workers in request.workers
        for strategy in _strategies(calibration, request, workers)
    ]
    for number, target in enumerate(targets, 1):
        progress(f"predicting {number} of {len(targets)}")
        try:
            found.append(predictor.predict(target))
        except NoPredictionError as error:
            skipped.setdefault(str(error), error)
    # One worker is no plan, unless it was all that was requested.
    is_single = bool(found) and request.strategies == ["single"]
    if skipped and not is_single and all(each.target.workers == 1 for each in found):
        raise next(iter(skipped.values()))
    return found, list(skipped)


def _strategies(calibration: Calibration, request: Request, workers: int) -> list[str]:
    """With several workers, `single` only if it is all that was requested."""
    if workers == 1:
        return ["single"]
    if several := [name for name in request.strategies if name != "single"]:
        return several
    measured = dict.fromkeys(run.strategy for run in calibration.runs if run.workers > 1)
    return [*request.strategies] or [name for name in measured if name in STRATEGIES] or ["ddp"]


def _target(
    calibration: Calibration, request: Request, strategy: str, workers: int, link: Link | None
) -> Target:
    size = request.batch_size or _batch_size(calibration, request.scaling)
    options = own_options(strategy, request.options) if workers > 1 else {}
    if not options and workers > 1:
        # The options of the runs, if they all have the same.
        used = [_planned(run.options) for run in calibration.runs if run.strategy == strategy]
        options = used[0] if used and all(each == used[0] for each in used) else {}
    hosts = _hosts(calibration, request, workers)
    target = Target(
        strategy,
        workers,
        size * workers if request.scaling == "weak" else size,
        without_defaults(strategy, options),
        hosts,
        None if hosts == 1 else link,
        measured_backend(calibration, strategy),
        request.scaling,
        request.slowdown,
        request.racks,
    )
    if strategy == "shared":
        return target
    return replace(target, backend=backend_on(target.backend, workers, target.host_count))


def _planned(options: Mapping[str, str]) -> dict[str, str]:
    """Without sizes that a run tuned itself."""
    return {key: value for key, value in options.items() if value != "measured"}


def _hosts(calibration: Calibration, request: Request, workers: int) -> int | None:
    """As many workers of each as in the runs, with as many workers if there are any.

    None: one per host with a link, or one host.
    """
    if request.hosts:
        return min(request.hosts, workers)
    per_host = calibration.workers_per_host(workers)
    if request.links or per_host is None or (per_host == 1 and calibration.links()):
        return None
    fewest = -(-workers // per_host)
    if fewest == 1 < workers and not calibration.is_one_host_measured:
        # What workers of one host exchange was not measured.
        return next(hosts for hosts in range(2, workers + 1) if workers % hosts == 0)
    return fewest


def _batch_size(calibration: Calibration, scaling: str) -> int:
    """The largest measured one."""
    if scaling == "weak":
        return max(point.samples for point in calibration.compute)
    batches = [run.global_samples for run in calibration.runs]
    return max([*batches, *(point.samples for point in calibration.compute)])
