"""One run: its settings, its result and its step times."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.analysis.step_times import StepTimes, read_timing, timing_of_result
from paceline.analysis.validation import check_result, is_number
from paceline.analysis.world_sizes import WorldSize, starts_of_result, worlds_of
from paceline.config import RunSettings
from paceline.records import Result, RunFolder, settings_of


@dataclass(frozen=True)
class Run:
    folder: RunFolder
    settings: RunSettings
    result: Result | None
    """None while there is no result.json: the run is still running, or was killed."""

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def status(self) -> str:
        return "unfinished" if self.result is None else str(self.result["status"])

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def cause(self) -> str:
        """Why it did not finish, as recorded; empty where nothing is."""
        return str(self.result["cause"] or "") if self.result else ""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for a run and copies of its folder: no two runs have the same measured times."""
        if self.result is None:
            return str(self.folder.path)
        return hashlib.sha256(json.dumps(self.result, sort_keys=True).encode()).hexdigest()

    @property
    def workers(self) -> list[dict[str, Any]]:
        """The report of each worker; empty if none could write one."""
        return list(self.result["workers"]) if self.result else []

    @property
    def post_mortems(self) -> list[dict[str, Any]]:
        """Of a profiled script: why its training stopped or paused."""
        return list(self.result.get("post_mortem", ())) if self.result else []

    @property
    def cuda_graph(self) -> dict[str, Any] | None:
        """How the steps ran on a GPU; None on a CPU and for older results."""
        return next((one["cuda_graph"] for one in self.workers if "cuda_graph" in one), None)

    @property
    def numerics(self) -> dict[str, Any] | None:
        """Precision and memory format, and why; older results and unfinished runs have none."""
        return next((one["numerics"] for one in self.workers if "numerics" in one), None)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return list(self.result["nodes"]) if self.result else []

    @property
    def history(self) -> list[dict[str, Any]]:
        return list(self.result["history"]) if self.result else []

    @property
    def iterations(self) -> int:
        if self.result is not None:
            return int(self.result["iterations"])
        return max((rank.end for rank in self.timing.ranks), default=0) if self.timing else 0

    @property
    def wall_seconds(self) -> float | None:
        """None while there is no result."""
        return self.result["wall_seconds"] if self.result else None

    @property
    def command_seconds(self) -> float | None:
        """Of a profiled command, with its start and imports; None of other runs."""
        value = (self.result or {}).get("command_seconds")
        return value if is_number(value) else None

    def final(self, key: str) -> float | None:
        """A figure at the end of the run: of `final`, or a metric by its name."""
        if self.result is None:
            return None
        value = self.result["final"].get(key, self.result.get("metrics", {}).get(key))
        return float(value) if is_number(value) else None

    @property
    def seconds_to_target(self) -> float | None:
        """Training time; None without a target, or if it was not reached."""
        return self.result["seconds_to_target"] if self.result else None

    @property
    def iterations_to_target(self) -> int | None:
        """Up to the first evaluation that reached the target; None if none did."""
        target = self.settings.target
        reached = (
            int(entry["iteration"])
            for entry in self.history
            if target is not None
            and is_number(value := entry.get(target.key))
            and target.is_reached(value)
        )
        return next(reached, None)

    def node_sum(self, key: str) -> float | None:
        """Sum over all nodes; None if one of them lacks the figure."""
        values = [value for node in self.nodes if is_number(value := node.get(key))]
        return sum(values) if values and len(values) == len(self.nodes) else None

    @property
    def worlds(self) -> list[WorldSize]:
        """More than one if the world size changed during the run."""
        return self.timing.worlds if self.timing else worlds_of(starts_of_result(self.result))

    @property
    def is_resized(self) -> bool:
        """Whether the world size changed; step times then cover the last world size only.

        Phases and traffic of a worker are counted since it joined, so they are not known per
        iteration for any world size.
        """
        return len(self.worlds) > 1

    @cached_property
    def is_synchronous(self) -> bool:
        """Whether every worker took part in each iteration of the run."""
        if any("staleness" in worker for worker in self.workers):
            return False
        if not self.is_finished:
            # Workers of a failed run may have completed an iteration that the run does not count.
            return True
        if self._recorded_timing is not None:
            return all(rank.count <= self.iterations for rank in self._recorded_timing.ranks)
        ranks = self.timing.ranks if self.timing else []
        return all(rank.end <= self.iterations for rank in ranks)

    @cached_property
    def iteration_seconds(self) -> float | None:
        """Step time: the mean without the first iteration; None if no iteration was timed.

        In an asynchronous run, some workers do more iterations than others: there it is the time in
        which all workers together process as many samples as an iteration of the run has.

        This is the only definition of the step time. It reads events only if the result does not
        suffice.
        """
        timing = self._recorded_timing or self.timing
        if timing is None or self.is_synchronous:
            return None if timing is None else timing.mean
        # Samples and iterations of a worker are both counted since the world size changed.
        samples = {worker["rank"]: worker.get("samples") or 0 for worker in self.workers}
        per_second = math.fsum(
            samples.get(rank.rank, 0) / rank.count / rank.mean
            for rank in timing.ranks
            if rank.mean and rank.count
        )
        total = (self.result or {}).get("samples")
        if not total or not per_second or not self.iterations:
            return timing.mean
        return float(total) / self.iterations / per_second

    @property
    def samples_per_second(self) -> float | None:
        """Of all workers together; None if samples were not counted."""
        samples, seconds = (self.result or {}).get("samples"), self.iteration_seconds
        if not samples or not seconds or not self.iterations:
            return None
        return float(samples) / self.iterations / seconds

    @cached_property
    def _recorded_timing(self) -> StepTimes | None:
        """From the result alone; None if it lacks the number of iterations of each worker."""
        if self.result is None or not all(worker.get("after_first") for worker in self.workers):
            return None
        return timing_of_result(self.result)

    @cached_property
    def timing(self) -> StepTimes | None:
        """None if no iteration was timed."""
        timing = read_timing(self.folder, self.result)
        return timing or (None if self.result is None else timing_of_result(self.result))


def open_run(path: Path) -> Run:
    """Read a run from its folder; RecordsError if it cannot be read."""
    folder = RunFolder(path)
    result = folder.read_result()
    if result is None:
        return Run(folder, folder.read_settings(), None)
    check_result(result, str(folder.result_file))
    return Run(folder, settings_of(result, folder.result_file), result)
