"""Totals of one rank across resumes, and its final report, which the launcher merges with others.

`weights_sha256` is a hash to compare the weights of two runs bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm.rank_info import RankInfo
from paceline.errors import DivergedError, PacelineError, StoppedError, error_line
from paceline.measure.phase_clock import PhaseClock
from paceline.records import (
    RunFolder,
    read_iteration_seconds,
    read_lines,
    summarize_iterations,
)
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.checkpoint import CheckpointStore
from paceline.training.run_state import Account
from paceline.training.steady import SteadyPhases


def weights_sha256(model_state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of all tensors, sorted by name.

    It does not depend on device, memory format or order of the mapping. It compares bits, not
    values: 0.0 and -0.0 differ.
    """
    digest = hashlib.sha256()
    for name in sorted(model_state):
        tensor = model_state[name].detach()
        # The header fixes how many bytes follow, so no two states give the same sequence of bytes.
        header = [name, str(tensor.dtype), list(tensor.shape)]
        digest.update(json.dumps(header).encode() + b"\n")
        flat = tensor.cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def final_weights_sha256(replica: Replica, strategy: Strategy) -> str | None:
    """Return the hash of the weights; None while this rank holds only a shard of them."""
    # A strategy whose setup failed may have none.
    layout = getattr(strategy, "checkpoint", None)
    has_full_weights = layout is None or layout.has_full_weights
    return weights_sha256(replica.model.state_dict()) if has_full_weights else None


class RunTotals:
    """Measurements of one rank since the start of the run, including the time before a resume."""

    def __init__(self, clock: PhaseClock, replica: Replica, store: CheckpointStore | None) -> None:
        self._clock = clock
        self._replica = replica
        self._store = store
        self.steady = SteadyPhases(clock, replica)
        self._phases_before: dict[str, float] = {}
        self._iteration_seconds_before: Sequence[float] = ()

    def restore(self, account: Account, events: Path, steps: range, iteration: int) -> None:
        """Continue from the checkpoint of `iteration` and the events of `steps`."""
        self._phases_before = account.get("phases", {})
        self._iteration_seconds_before = read_iteration_seconds(events, steps.stop, steps.start)
        self._replica.hidden_exchange_seconds = account.get("hidden_exchange_seconds", 0.0)
        if steps:
            self.steady.resume(account.get("after_first"))
        if "traffic" in account:
            self._replica.communicator.traffic.restore(account["traffic"])
        if self._store:
            blocked_seconds = _read_blocked_seconds(events, iteration)
            self._store.restore(account.get("checkpoints", {}), iteration, blocked_seconds)

    def to_dict(self) -> Account:
        """Return the totals for a checkpoint."""
        return {
            "phases": self.phases,
            "traffic": self._replica.communicator.traffic.to_dict(),
            "hidden_exchange_seconds": self._replica.hidden_exchange_seconds,
            "checkpoints": self.checkpoints,
            "after_first": self.steady.to_dict(),
        }

    @property
    def phases(self) -> dict[str, float]:
        before = self._phases_before
        return {name: before.get(name, 0.0) + spent for name, spent in self._clock.seconds.items()}

    @property
    def seconds_before(self) -> float:
        """Wall time before the last resume."""
        return sum(self._phases_before.values())

    @property
    def iteration_seconds(self) -> list[float]:
        return [*self._iteration_seconds_before, *self._clock.step_seconds]

    @property
    def checkpoints(self) -> dict[str, Any]:
        store = self._store
        return {
            "count": store.count if store else 0,
            "bytes": store.bytes if store else 0,
            "blocked_seconds": store.blocked_seconds if store else 0.0,
            "background_seconds": store.background_seconds if store else 0.0,
            "extra_memory_bytes": store.extra_memory_bytes if store else 0,
            "extra_gpu_memory_bytes": store.extra_gpu_memory_bytes if store else 0,
        }


def _read_blocked_seconds(path: Path, iteration: int) -> float:
    """Return how long the checkpoint of an iteration blocked training, from the events."""
    waits = [
        event["blocked_seconds"]
        for event in read_lines(path)
        if event.get("event") == "checkpoint" and event["iteration"] == iteration
    ]
    return float(waits[-1]) if waits else 0.0


@dataclass(slots=True)
class RankReport:
    """The outcome of one rank; a worker process writes it to a file for the launcher."""

    status: str
    cause: str | None
    exit_code: int
    is_secondary: bool
    """Whether the failure is a consequence of another rank's."""
    ended: float
    """Unix time, to find the first failure."""
    is_together: bool
    """Whether all ranks ended after the same iteration."""
    iterations: int
    weights_sha256: str | None
    """None if the run ended while this rank held only a shard of the weights."""
    train_loss: float | None
    seconds_to_target: float | None
    history: list[dict[str, Any]]
    worker: dict[str, Any]
    checkpoints: dict[str, Any]
    measuring_fraction: float
    warnings: list[str]
    samples_before: int = 0
    """Of all ranks, when the number of ranks last changed."""


def account_of(
    rank_info: RankInfo,
    samples: int | None,
    phases: dict[str, float],
    iteration_seconds: Sequence[float],
    replica: Replica,
    strategy: Strategy,
    steady: SteadyPhases,
) -> dict[str, Any]:
    """Return the entry of one rank in `workers` of result.json."""
    after_first = steady.to_dict()
    return {
        "rank": rank_info.rank,
        "node": rank_info.node_rank,
        "samples": samples,
        "wall_seconds": sum(phases.values()),
        "iteration_seconds": summarize_iterations(iteration_seconds),
        "phases": phases,
        "hidden_exchange_seconds": replica.hidden_exchange_seconds,
        "after_first": after_first
        and {"iterations": max(0, len(iteration_seconds) - 1), **after_first},
        "traffic": replica.communicator.traffic.to_dict(),
        # The same on every rank.
        **({} if rank_info.rank else _tensors(replica)),
        **(strategy.meter.summary() if strategy.meter is not None else {}),
    }


def _tensors(replica: Replica) -> dict[str, Any]:
    weights = replica.trainable
    return {
        "tensor_bytes": [each.nbytes for each in weights],
        "tensor_shapes": [list(each.shape) for each in weights],
    }


def explain(error: BaseException, folder: RunFolder) -> tuple[str, str, int]:
    """Return status, one-line cause and exit code; writes the traceback of an unexpected error."""
    if isinstance(error, KeyboardInterrupt):
        error = StoppedError("interrupted")
    if isinstance(error, PacelineError):
        kinds: dict[type, str] = {DivergedError: "diverged", StoppedError: "stopped"}
        status = next((text for kind, text in kinds.items() if isinstance(error, kind)), "failed")
        return status, str(error), error.exit_code
    file = folder.path / "traceback.txt"
    with contextlib.suppress(OSError):
        file.write_text("".join(traceback.format_exception(error)))
    cause = error_line(error)
    return "failed", f"{cause} (traceback in {file})", 1
