"""Predictions with intervals: what a job costs on other numbers of workers and other links.

`Predictor.predict` simulates a step with the measurements of the calibration, which is the
prediction, and with every bootstrap sample of them: the interval covers 80% of these. It predicts
the step time of a run as reports define it: the mean over the steps, without the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import MissingMeasurementError, NoPredictionError
from paceline.plan.calibration import COMPUTE_PHASES, Calibration, MeasuredRun
from paceline.plan.cluster_simulation import racks_factor
from paceline.plan.codec_cost import CODEC_OPTIONS, CodecCost, codec_cost
from paceline.plan.collective_cost import NO_TIME, CollectiveTime
from paceline.plan.collective_times import CollectiveMeasurements, CollectiveTimes, Place
from paceline.plan.compute_times import FEWEST_RUNS, NORMAL_MAD, ComputeTimes
from paceline.plan.corrections import LEAST_CORRECTION, Corrections
from paceline.plan.host_levels import Level, levels_of
from paceline.plan.host_sharing import HostSharing
from paceline.plan.job import Collective, Compute, Job, StepTime
from paceline.plan.overlap_costs import OverlapCosts, overlap_costs, phases_with_hooks
from paceline.plan.step_simulation import (
    BUCKET_STRATEGIES,
    STRATEGIES,
    fsdp_blocks,
    has_concurrent_collectives,
    local_steps,
    simulate_step,
)
from paceline.plan.stragglers import asynchronous_mean, bounded_mean, expected_maximum
from paceline.plan.target import Target

Floats = NDArray[np.float64]

DEFAULT_STALENESS = 4
"""Of `parameter_server` with mode=bounded."""

SAMPLES = 100
ERRORS = 4
"""Of a sample, besides the measurements that it draws."""
LOW, HIGH = 0.1, 0.9
"""Quantiles of the interval."""
COMPUTE_ERROR, COMMUNICATION_ERROR = 0.03, 0.05
"""Relative standard deviation between two runs that no single run shows: placement, clock speed,
other programs; and of what the model leaves out."""
LEAST_DISTANCE = 0.5
"""Doublings of the measured number of workers: also as many workers are a prediction."""
RUN_DEVIATION = 0.045
"""Relative standard deviation of the step time between runs on one machine, if too few runs show
it: what 48 pairs of runs show without the shift between their sessions
(docs/results.md#accuracy-of-plans)."""
LEAST_RUN_DEVIATION = 0.02
MOST_INDEPENDENCE = 4.0
"""Runs whose workers wait longer than that were disturbed."""
MOST_WORKERS_FACTOR = 4
"""A prediction for more times the measured number of workers is extrapolated."""


@dataclass(frozen=True, slots=True)
class Interval:
    median: float
    """From the measurements themselves, which are in the middle of their bootstrap samples."""
    low: float
    high: float

    @classmethod
    def of(cls, values: Floats) -> Interval:
        """The first value is that of the measurements, the others are those of samples."""
        median = float(values[0])
        low, high = (float(each) for each in np.quantile(values[1:], (LOW, HIGH)))
        return cls(median, min(low, median), max(high, median))

    def to_dict(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Prediction:
    target: Target
    step_seconds: Interval
    throughput: Interval
    """Samples per second."""
    efficiency: Interval
    """Throughput relative to that of as many workers that need not communicate (Target.scaling)."""
    exposed_communication: Interval
    """Share of a step."""
    link_bytes: float
    """Bytes per step in one direction of the busiest link."""
    memory_bytes: float | None
    """Of a worker, without dataset, Python and libraries; None if it was not measured."""
    extrapolated: tuple[str, ...]
    """Why this is outside the measured range; empty if it is inside."""

    def to_dict(self) -> dict[str, Any]:
        target = self.target
        return {
            "workers": target.workers,
            "hosts": target.host_count,
            "strategy": target.strategy,
            "options": dict(target.options),
            "link": str(target.link) if target.link else None,
            "batch_size": target.samples,
            "scaling": target.scaling,
            "racks": None if target.racks is None else asdict(target.racks),
            "step_seconds": self.step_seconds.to_dict(),
            "throughput": self.throughput.to_dict(),
            "efficiency": self.efficiency.to_dict(),
            "exposed_communication": self.exposed_communication.to_dict(),
            "link_bytes": self.link_bytes,
            "memory_bytes": self.memory_bytes,
            "extrapolated": bool(self.extrapolated),
            "extrapolated_because": list(self.extrapolated),
        }


class _Sample:
    """One bootstrap sample of a calibration."""

    def __init__(
        self,
        calibration: Calibration,
        measurements: CollectiveMeasurements,
        random: np.random.Generator | None,
        errors: Sequence[float],
    ) -> None:
        self.compute = ComputeTimes(calibration, random)
        self.collectives = CollectiveTimes(measurements, random)
        pooled = np.array([each for worker in calibration.residuals for each in worker])
        if random is not None and len(pooled):
            pooled = random.choice(pooled, len(pooled))
        self.residuals = pooled / pooled.mean() if len(pooled) else np.ones(1)
        self.compute_error, self.communication_error, self.correction_error, self.run_error = errors
        """In standard deviations."""
        self._slowest: dict[tuple[float, int, float, int], float] = {}
        self._codec_timings = calibration.codec_timings
        # Codecs draw from seeds of their own, so that the order of predictions changes none.
        self._codec_seed = None if random is None else int(random.spawn(1)[0].integers(2**63))
        self._codecs: dict[tuple[str | None, ...], CodecCost | None] = {}

    def codec(self, options: Mapping[str, str]) -> CodecCost | None:
        key = tuple(options.get(name) for name in CODEC_OPTIONS)
        if key not in self._codecs:
            seed = self._codec_seed
            random = None if seed is None else np.random.default_rng(seed)
            self._codecs[key] = codec_cost(options, self._codec_timings, random)
        return self._codecs[key]

    def slowest(self, independence: float, workers: int, slowdown: float, steps: int) -> float:
        """The expected maximum over the workers, of residuals that vary by this share."""
        key = independence, workers, slowdown, steps
        if key not in self._slowest:
            residuals = 1 + independence * (self.residuals - 1)
            self._slowest[key] = expected_maximum(residuals, workers, slowdown, steps)
        return self._slowest[key]


class Predictor:
    """Predicts from one calibration; samples are drawn once, so that predictions compare."""

    def __init__(self, calibration: Calibration, samples: int = SAMPLES, seed: int = 0) -> None:
        self.calibration = calibration
        self._count, self._seed = samples, seed
        self._measurements = CollectiveMeasurements(calibration)
        self._host = HostSharing(calibration)
        self._known_overlap_costs: dict[tuple[str, Place], OverlapCosts] = {}
        self._corrections = Corrections(
            calibration.runs, self._exchange_seconds, self._measured_exchange
        )

    @cached_property
    def _samples(self) -> list[_Sample]:
        """The measurements themselves, then bootstrap samples of them."""
        random = np.random.default_rng(self._seed)
        # Evenly spaced quantiles and their opposites, so that no error is drawn too often.
        half = self._count // 2
        spaced = [NormalDist().inv_cdf((rank + 0.5) / self._count) for rank in range(half)]
        signs = random.choice((-1.0, 1.0), (half, ERRORS))
        errors = signs * np.transpose([random.permutation(spaced) for _ in range(ERRORS)])
        odd = np.zeros((self._count % 2, ERRORS))
        errors = np.concatenate([errors, odd, -errors])
        drawn = (
            _Sample(self.calibration, self._measurements, random, each) for each in errors.tolist()
        )
        return [self._center, *drawn]

    @cached_property
    def _center(self) -> _Sample:
        """The measurements themselves."""
        return _Sample(self.calibration, self._measurements, None, [0.0] * ERRORS)

    def predict(self, target: Target) -> Prediction:
        """NoPredictionError if the calibration lacks what the prediction needs, or if no run can be
        like the target."""
        steps = self._steps(target)
        factor = self._racks_factor(target)
        seconds = np.array([step.seconds for step in steps]) * factor
        alone = np.array(
            [
                self._single(sample, target) * self._compute_deviation(sample)
                for sample in self._samples
            ]
        )
        # What racks add to a step is communication.
        exchange = np.array([step.exchange_seconds for step in steps])
        exposed = (exchange + seconds * (1 - 1 / factor)) / seconds
        # Step times differ between runs, by as much as compute times where a step computes.
        deviations = np.hypot(LEAST_RUN_DEVIATION, (1 - exposed) * self._run_deviation)
        one_run = seconds * np.exp(deviations * [each.run_error for each in self._samples])
        return Prediction(
            target,
            Interval.of(one_run),
            Interval.of(target.samples / one_run),
            Interval.of(alone / target.workers / seconds),
            Interval.of(exposed),
            steps[0].link_bytes,
            self._memory_bytes(target),
            tuple(self.extrapolations(target)),
        )

    def step_seconds(self, target: Target) -> Floats:
        """With the measurements and each sample of them, so that targets can be compared sample by
        sample."""
        seconds = np.array([step.seconds for step in self._steps(target)])
        return seconds * self._racks_factor(target)

    def typical_step_seconds(self, target: Target) -> float:
        """From the measurements themselves, without samples of them: fast, to compare targets."""
        target.check()
        compute = self._compute_factor(target)
        step = self._simulate(self._center, target, compute, self._corrections.of(target).factor)
        return step.seconds * self._racks_factor(target)

    def _steps(self, target: Target) -> list[StepTime]:
        target.check()
        correction = self._corrections.of(target)
        compute = self._compute_factor(target)
        return [
            self._simulate(
                sample,
                target,
                self._compute_deviation(sample) * compute,
                correction.factor * math.exp(correction.deviation * sample.correction_error),
            )
            for sample in self._samples
        ]

    def _single(self, sample: _Sample, target: Target) -> float:
        """Time in which one worker computes the samples of a step."""
        if target.scaling == "weak" or len(sample.compute.samples) == 1:
            return target.workers * sample.compute.at(target.samples_of_worker).seconds
        return sample.compute.at(target.samples).seconds

    def _simulate(
        self, sample: _Sample, target: Target, compute_factor: float, software_factor: float
    ) -> StepTime:
        return simulate_step(self._job(sample, target, compute_factor, software_factor))

    def _racks_factor(self, target: Target) -> float:
        if target.racks is None or target.workers == 1:
            return 1.0
        job = self._job(self._center, target, self._compute_factor(target), 1.0)
        times, factors = self._center.collectives, target.factors
        members = target.host_count if target.place.is_across_hosts else target.workers
        return racks_factor(
            job,
            lambda operation, algorithm: times.rounds(
                operation, algorithm, target.place, members
            ).scaled(factors.latency, factors.transfer),
            target.racks,
        )

    def _job(
        self, sample: _Sample, target: Target, compute_factor: float, software_factor: float
    ) -> Job:
        compute, local_factor = self._slowest_compute(sample, target, compute_factor)
        concurrent_slowdown = 1.0
        is_concurrent = has_concurrent_collectives(target.strategy, target.options)
        if is_concurrent and target.place.is_across_hosts:
            # What runs of such a strategy take longer is due to collectives in progress at once.
            # Within a host these also copy more slowly, which a factor on all software describes.
            # If runs are faster than the model, the software of each collective is.
            concurrent_slowdown = max(software_factor, 1.0)
            software_factor = min(software_factor, 1.0)
        codec = sample.codec(target.options)
        costs = self._overlap_costs(target)
        return Job(
            target.strategy,
            target.options,
            target.workers,
            target.host_count,
            self.calibration.gradients,
            self.calibration.optimizer_state_bytes,
            compute,
            self._collective(sample, target, software_factor),
            local_factor,
            codec and replace(codec, factor=compute_factor * self._compute_slowdown(target)),
            target.backend,
            concurrent_slowdown,
            costs.launch_seconds,
            costs.contention,
        )

    def _compute_slowdown(self, target: Target) -> float:
        """By other workers of the host, and by what the target changes."""
        return self._host.compute(target.workers_per_host) * target.factors.compute

    def _slowest_compute(
        self, sample: _Sample, target: Target, compute_factor: float
    ) -> tuple[Compute, float]:
        """Compute times of the slowest worker in a step, and the factor on them over all local
        steps."""
        workers, slowdown, options = target.workers, target.slowdown, target.options
        steps = local_steps(target.strategy, options)
        slowest, local = (
            sample.slowest(self._independence, workers, slowdown, each) for each in (1, steps)
        )
        mode = options.get("mode", "sync")
        if mode == "bounded":
            bound = int(options.get("staleness", DEFAULT_STALENESS))
            slowest = local = bounded_mean(workers, slowdown, slowest, bound)
        elif mode == "async":
            slowest = local = asynchronous_mean(workers, slowdown)
        compute = sample.compute.at(target.samples_of_worker)
        compute = compute.scaled(compute_factor * self._compute_slowdown(target) * slowest)
        if mode == "sync":
            late = self._host.late_seconds(target.workers_per_host, compute.seconds, steps)
            compute = compute.scaled(1 + late / compute.seconds)
        if target.strategy == "parameter_server":
            # The servers update the weights, which no worker slows.
            compute = replace(compute, update=compute.update / slowest)
        return compute, local / slowest

    def _collective(self, sample: _Sample, target: Target, software_factor: float) -> Collective:
        """Times of collectives between the workers of the target."""
        times, factors = sample.collectives, target.factors
        per_host = -(-target.workers // target.host_count)
        is_concurrent = has_concurrent_collectives(target.strategy, target.options)
        communication = 1.0
        if sample.communication_error:
            error = self._communication_error * self._distance(target)
            communication = math.exp(error * sample.communication_error)

        def of_level(level: Level) -> CollectiveTime:
            timed = level.operation, level.algorithm, level.place
            rounds = times.rounds(*timed, level.members)
            is_across = level.place.is_across_hosts
            # Of more workers per host than were measured.
            measured = 1 if is_across else min(per_host, times.most_members(*timed))
            slowdown = self._host.oversubscription(per_host) / self._host.oversubscription(measured)
            time = rounds.scaled(factors.latency, factors.transfer).time(level.rounds)
            time = time.scaled(slowdown * communication)
            if is_across:
                return time.scaled(1.0, software_factor)
            # Collectives of more workers share the cores already: what those in progress at once
            # take longer is that of two workers. Whether the overhead of others grows with the
            # rounds of more workers or stays that of two is not known: the mean of both.
            few = times.rounds(*timed).scaled(factors.latency, factors.transfer)
            extra = few.time(level.rounds).scaled(communication)
            share = software_factor - 1
            if is_concurrent:
                return time.with_software(extra, share)
            return time.with_software(extra, share / 2).with_software(time, share / 2)

        def collective(operation: str, algorithm: str, size_bytes: float) -> CollectiveTime:
            levels = levels_of(
                operation, algorithm, target.workers, target.host_count, size_bytes, target.place
            )
            return sum(map(of_level, levels), NO_TIME)

        return collective

    def _overlap_costs(self, target: Target) -> OverlapCosts:
        # With NCCL, the passes of FSDP contain its communication.
        has_hooks = target.strategy in BUCKET_STRATEGIES or (
            target.strategy == "fsdp" and target.backend != "nccl"
        )
        if not has_hooks or target.workers == 1:
            return OverlapCosts()
        key = target.strategy, target.place
        if key not in self._known_overlap_costs:
            self._known_overlap_costs[key] = overlap_costs(
                self.calibration.runs, target, self._seconds_without_hooks, self._run_deviation
            )
        return self._known_overlap_costs[key]

    def _seconds_without_hooks(self, run: MeasuredRun) -> float:
        """Of the passes with hooks of a run, if it did not communicate meanwhile."""
        phases = phases_with_hooks(run.strategy)
        target = Target.of(run)
        try:
            compute = self._center.compute.at(run.samples)
        except MissingMeasurementError:
            return math.fsum(run.phases[phase] for phase in phases)
        ratio = self._compute_ratio(run) or self._compute_factor(target)
        alone = math.fsum(getattr(compute, phase) for phase in phases)
        return ratio * self._host.compute(target.workers_per_host) * alone

    def _compute_factor(self, target: Target) -> float:
        """Compute time in distributed runs, relative to what the compute points say."""
        if target.workers == 1 or not self._compute_ratios:
            return 1.0
        return float(np.median(self._compute_ratios))

    @cached_property
    def _compute_ratios(self) -> list[float]:
        """Of each run of several workers."""
        ratios = (self._compute_ratio(run) for run in self.calibration.runs if run.workers > 1)
        return [ratio for ratio in ratios if ratio is not None]

    @cached_property
    def _run_deviation(self) -> float:
        """Relative standard deviation of the step time between runs, by their compute times."""
        if len(self._compute_ratios) < FEWEST_RUNS:
            return RUN_DEVIATION
        return _spread(self._compute_ratios, LEAST_RUN_DEVIATION)

    def _compute_deviation(self, sample: _Sample) -> float:
        return math.exp(self._compute_error * sample.compute_error)

    @cached_property
    def _compute_error(self) -> float:
        """Relative standard deviation of compute times, besides that between runs."""
        return math.hypot(COMPUTE_ERROR, self._center.compute.deviation)

    @cached_property
    def _communication_error(self) -> float:
        """Relative standard deviation of the exchanges of runs from those of the model."""
        ratios = []
        for run in self.calibration.runs:
            if run.workers > 1 and run.strategy in STRATEGIES:
                try:
                    modeled = self._exchange_seconds(run, 1.0)
                except NoPredictionError:
                    continue  # the collectives in its place were not measured
                ratio = self._measured_exchange(run) / max(modeled, 1e-9)
                ratios += [ratio] if ratio > 0 else []
        return _spread(ratios, COMMUNICATION_ERROR)

    def _distance(self, target: Target) -> float:
        """From the largest measured number of workers, in doublings: errors grow with it.

        On one host, of runs only: with workers that compute in between, collectives of more workers
        take other times than `paceline comm` measures.
        """
        measured = self._center.collectives.most_workers(target.place)
        if not target.place.is_across_hosts:
            measured = max([2, *(run.workers for run in self.calibration.runs if run.hosts == 1)])
        return max(LEAST_DISTANCE, math.log2(target.workers / measured))

    @cached_property
    def _independence(self) -> float:
        """How much of the variation of a worker's steps makes others wait.

        Workers of one machine are often slow at the same time, while differences between workers,
        and the noise of communication, are not in the steps of a single one. The ratio of the
        measured wait to that of independent workers, median over the runs; 1 without runs.
        """
        ratios = []
        for run in self.calibration.runs:
            compute = math.fsum(run.phases.get(phase, 0.0) for phase in COMPUTE_PHASES)
            expected = expected_maximum(self._center.residuals, run.workers) - 1
            if run.workers > 1 and "wait" in run.phases and compute > 0 and expected > 1e-6:
                ratios.append(run.phases["wait"] / compute / expected)
        return min(float(np.median(ratios)), MOST_INDEPENDENCE) if ratios else 1.0

    def _compute_ratio(self, run: MeasuredRun) -> float | None:
        """From phases in which the strategy neither communicates nor leaves work to others.

        None if they are not a substantial part of a step, such as the input alone.
        """
        phases = [phase for phase in run.compute_phases if phase in run.phases]
        if "forward" not in phases:
            return None
        try:
            modeled = self._center.compute.at(run.samples)
        except MissingMeasurementError:
            return None
        model = math.fsum(getattr(modeled, phase) for phase in phases)
        model *= self._host.compute(Target.of(run).workers_per_host)
        measured = math.fsum(run.phases[phase] for phase in phases)
        if model <= 0 or measured <= 0:
            return None
        return min(max(measured / model, LEAST_CORRECTION), 1 / LEAST_CORRECTION)

    def _measured_exchange(self, run: MeasuredRun) -> float:
        """Exposed communication of a step; the whole step if the run did not record it.

        What workers wait for each other longer than stragglers explain is communication, too.
        """
        if "exchange" not in run.phases:
            return run.step_seconds
        wait = run.phases.get("wait", 0.0)
        if run.strategy != "parameter_server":
            compute = math.fsum(run.phases.get(phase, 0.0) for phase in COMPUTE_PHASES)
            steps = local_steps(run.strategy, run.options)
            slowest = self._center.slowest(self._independence, run.workers, 1.0, steps)
            per_host = Target.of(run).workers_per_host
            late = self._host.late_seconds(per_host, compute * slowest, steps)
            wait = max(0.0, wait - compute * (slowest - 1) - late)
        return run.phases["exchange"] + wait

    def _exchange_seconds(self, run: MeasuredRun, software_factor: float) -> float:
        """By the model, for a step like those of the run: what `_measured_exchange` measures."""
        compute = self._compute_ratio(run) or 1.0
        step = self._simulate(self._center, Target.of(run), compute, software_factor)
        return step.exchange_seconds if "exchange" in run.phases else step.seconds

    def _memory_bytes(self, target: Target) -> float | None:
        activations = self.calibration.activation_bytes_per_sample
        if activations is None:
            return None
        weights = float(self.calibration.gradient_bytes)
        state = float(self.calibration.optimizer_state_bytes)
        share = 1 / target.workers
        match target.strategy:
            case "sharded":
                model = 2 * weights + share * state
            case "shared":
                # Workers of a host share one copy of the weights.
                model = (1 + share) * weights + share * state
            case "fsdp":
                # Of the weights and gradients of one block, all are needed at a time.
                largest = max(fsdp_blocks([each.size_bytes for each in self.calibration.gradients]))
                model = share * (2 * weights + state) + 2 * largest
            case "parameter_server":
                model = 2 * weights
            case "overlap" | "ddp":
                model = 3 * weights + state
            case _:
                model = 2 * weights + state
        return model + activations * target.samples_of_worker

    def extrapolations(self, target: Target) -> list[str]:
        """Why the target is outside the measured range; empty if it is inside."""
        found = []
        compute = self._center.compute
        if not compute.is_measured(target.samples_of_worker):
            low, high = compute.samples[0], compute.samples[-1]
            found.append(
                f"{target.samples_of_worker} samples per worker, measured {low:g} to {high:g}"
            )
        if target.workers > 1:
            measured = self._center.collectives.most_workers(target.place)
            if target.workers > MOST_WORKERS_FACTOR * measured:
                found.append(f"{target.workers} workers, measured {measured}")
            found += self._center.collectives.extrapolations(target.place)
        return found


def _spread(ratios: Sequence[float], least: float) -> float:
    """Standard deviation of the logarithms, without outliers; at least `least`."""
    if len(ratios) < FEWEST_RUNS:
        return least
    logs = np.log(ratios)
    return max(least, NORMAL_MAD * float(np.median(np.abs(logs - np.median(logs)))))
