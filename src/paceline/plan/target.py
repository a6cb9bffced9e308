"""What to predict: a strategy on a number of workers, a batch and a link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from paceline.errors import NoPredictionError
from paceline.plan.calibration import Calibration, MeasuredRun
from paceline.plan.cluster_simulation import Racks
from paceline.plan.collective_times import Place
from paceline.plan.links import Link


def measured_backend(calibration: Calibration, strategy: str) -> str:
    """That of the runs, of this strategy first; without runs, that of the collectives."""
    if strategy == "shared":
        return "shm"
    same = [run.backend for run in calibration.runs if run.strategy == strategy]
    used = [*same, *(run.backend for run in calibration.runs if run.strategy != "shared")]
    measured = [timing.backend for timing in calibration.collectives]
    return next(iter([*used, *(["gloo"] if "gloo" in measured else measured)]), "gloo")


def backend_on(backend: str, workers: int, hosts: int) -> str:
    """The one that runs with this backend have on these hosts: only memory of a host is shared."""
    if backend not in ("shm", "hierarchical"):
        return backend
    if hosts == 1:
        return "shm"
    return "hierarchical" if workers > hosts else "gloo"


@dataclass(frozen=True, slots=True)
class TimeFactors:
    """Factors on what the calibration measured, for questions such as: what if links were faster?

    Unlike another link, they keep the correction by runs on the same link.
    """

    compute: float = 1.0
    latency: float = 1.0
    transfer: float = 1.0
    """Of each byte."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to predict."""

    strategy: str
    workers: int
    samples: int
    """Samples of the global batch."""
    options: Mapping[str, str] = field(default_factory=dict)
    hosts: int | None = None
    """None: one worker per host, if there is a link, else one host."""
    link: Link | None = None
    """Between the hosts."""
    backend: str = "gloo"
    """As in CollectiveTiming."""
    scaling: Literal["strong", "weak"] = "strong"
    """What efficiency is relative to: one worker with the global or with its local batch."""
    slowdown: float = 1.0
    """Compute time of the slowest worker's machine, relative to the others."""
    racks: Racks | None = None
    """None: the links of all hosts meet in one switch."""
    factors: TimeFactors = TimeFactors()

    @classmethod
    def of(cls, run: MeasuredRun) -> Self:
        """What was measured."""
        return cls(
            run.strategy,
            run.workers,
            run.global_samples,
            run.options,
            run.hosts,
            run.link,
            run.backend,
        )

    def check(self) -> None:
        """NoPredictionError if no run is like this."""
        if self.samples < self.workers:
            raise NoPredictionError(
                f"a batch of {self.samples} has no sample for some of {self.workers} workers:"
                " choose fewer --workers or a larger --batch-size"
            )
        if self.workers % self.host_count:
            raise NoPredictionError(
                f"{self.workers} workers cannot share {self.host_count} hosts equally: choose other"
                " --workers or --hosts"
            )
        if self.racks is not None and self.workers > 1:
            self._check_racks()

    def _check_racks(self) -> None:
        if self.host_count == 1:
            raise NoPredictionError("--racks: all workers are on one host: add --link or --hosts")
        if self.options.get("codec", "none") != "none":
            raise NoPredictionError("--racks: no plan with codecs: omit one of them")
        if self.backend == "hierarchical":
            raise NoPredictionError(
                "--racks: no plan for --communicator hierarchical: give runs without it"
            )

    @property
    def host_count(self) -> int:
        return self.hosts or (self.workers if self.link else 1)

    @property
    def workers_per_host(self) -> float:
        return self.workers / self.host_count

    @property
    def place(self) -> Place:
        return Place(self.backend, self.host_count > 1, self.link)

    @property
    def samples_of_worker(self) -> int:
        """Of the worker with the most samples."""
        return -(-self.samples // self.workers)
