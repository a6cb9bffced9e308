"""What a worker tells at its end; the launcher makes result.json of all of them."""

from __future__ import annotations

import contextlib
import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.comm.place import Place
from paceline.errors import DivergedError, PacelineError, StoppedError, in_a_line
from paceline.records import RunFolder
from paceline.sync.replica import Replica
from paceline.sync.strategy import Strategy
from paceline.worker.steady import SteadyPhases


@dataclass(slots=True)
class WorkerReport:
    status: str
    cause: str | None
    exit_code: int
    is_echo: bool
    """Whether the failure is only what this worker saw of another one's."""
    ended: float
    """Unix time, to find the first of several failures."""
    is_together: bool
    """Whether all workers ended after the same iteration."""
    iterations: int
    weights_sha256: str | None
    """None where a run ended while each worker had a part of the weights only."""
    train_loss: float | None
    seconds_to_target: float | None
    history: list[dict[str, Any]]
    worker: dict[str, Any]
    checkpoints: dict[str, Any]
    measuring_fraction: float
    warnings: list[str]
    samples_before: int = 0
    """That all workers together had trained on when their number changed last."""


def summarise_iterations(seconds: Sequence[float]) -> dict[str, float | None]:
    """The first iteration apart, and the others' mean, median and 95th percentile."""
    if not seconds:
        return dict.fromkeys(("first", "mean", "median", "p95"))
    rest = sorted(seconds[1:]) or [seconds[0]]
    return {
        "first": seconds[0],
        "mean": statistics.fmean(rest),
        "median": statistics.median(rest),
        "p95": rest[min(len(rest) - 1, round(0.95 * (len(rest) - 1)))],
    }


def account_of(
    place: Place,
    samples: int,
    phases: dict[str, float],
    iteration_seconds: Sequence[float],
    replica: Replica,
    strategy: Strategy,
    steady: SteadyPhases,
) -> dict[str, Any]:
    """One worker's part of the result."""
    after_first = steady.to_dict()
    return {
        "rank": place.rank,
        "node": place.node,
        "samples": samples,
        "wall_seconds": sum(phases.values()),
        "iteration_seconds": summarise_iterations(iteration_seconds),
        "phases": phases,
        "hidden_exchange_seconds": replica.hidden_exchange_seconds,
        "after_first": after_first
        and {"iterations": max(0, len(iteration_seconds) - 1), **after_first},
        "traffic": replica.communicator.traffic.to_dict(),
        **strategy.account(),
    }


def explain(error: BaseException, folder: RunFolder) -> tuple[str, str, int]:
    """Status, cause in a line, and exit code; the traceback of a surprise goes into a file."""
    if isinstance(error, KeyboardInterrupt):
        error = StoppedError("interrupted")
    if isinstance(error, PacelineError):
        kinds: dict[type, str] = {DivergedError: "diverged", StoppedError: "stopped"}
        status = next((text for kind, text in kinds.items() if isinstance(error, kind)), "failed")
        return status, str(error), error.exit_code
    file = folder.path / "traceback.txt"
    with contextlib.suppress(OSError):
        file.write_text("".join(traceback.format_exception(error)))
    cause = in_a_line(error)
    return "failed", f"{cause} (traceback in {file})", 1
