"""Repeats of a configuration as one group, and labels that distinguish groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from paceline.analysis.run import Run
from paceline.config import RunConfig, key

IGNORED_FIELDS = frozenset(
    (
        "seed", "name", "out", "data_dir", "node_rank", "master_addr", "master_port", "trace",
        "tensorboard", "sample_seconds", "rendezvous_seconds", "timeout_seconds", "max_restarts",
        "resident_limit_mib", "checkpoint_keep",
    )
)  # fmt: skip
"""Settings in which repeats may differ."""


NOT_RUN = "not run yet"
"""The trouble of a configuration that a study has not started yet."""


@dataclass(frozen=True)
class RunGroup:
    """Runs with the same settings; `label` is for tables and legends."""

    label: str
    runs: list[Run]
    trouble: str = ""
    """Why a run that the study asks for is missing."""
    axes: dict[str, str] = field(default_factory=dict)
    """Of a study's configuration: axis of the grid -> label of its value."""

    @cached_property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.is_finished]

    @property
    def shown(self) -> list[Run]:
        """The finished runs; if there are none, the others."""
        return self.finished or self.runs

    @cached_property
    def timed(self) -> list[Run]:
        """Finished runs with step times, which can be ranked."""
        return [run for run in self.finished if run.timing is not None]

    @property
    def config(self) -> RunConfig:
        return self.runs[0].config

    @property
    def workers(self) -> int:
        return self.config.workers

    @property
    def status(self) -> str:
        """The common status, or each status with its count."""
        counts: dict[str, int] = {}
        for run in self.runs:
            counts[run.status] = counts.get(run.status, 0) + 1
        if not counts:
            return "not run"
        if len(counts) == 1:
            return next(iter(counts))
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    @property
    def unfinished(self) -> list[Run]:
        """Runs that did not finish, those that failed first."""
        runs = [run for run in self.runs if not run.is_finished]
        return sorted(runs, key=lambda run: run.status != "failed")

    @property
    def has_failed(self) -> bool:
        """Whether a run failed or could not be started, as opposed to stopped or skipped."""
        return "failed" in (*(run.status for run in self.runs), self.trouble.partition(":")[0])

    @property
    def is_troubled(self) -> bool:
        """Whether a run failed, did not finish or is missing."""
        return len(self.finished) < len(self.runs) or self.trouble not in ("", NOT_RUN)

    @cached_property
    def iteration_means(self) -> list[float]:
        """Step time of each finished run."""
        return [mean for run in self.timed if (mean := run.iteration_seconds) is not None]

    @cached_property
    def samples_in_iteration(self) -> float:
        """Mean over the run, which includes the smaller last batch of an epoch."""
        for run in self.timed:
            if run.iterations and run.result is not None and run.result["samples"]:
                return float(run.result["samples"]) / run.iterations
        return float(self.config.global_batch_size)

    def values(
        self, get: Callable[[Run], float | None], runs: Sequence[Run] | None = None
    ) -> list[float]:
        """A figure of each finished run, or of each of `runs`, that has it."""
        return known(map(get, self.finished if runs is None else runs))

    def finals(self, key: str) -> list[float]:
        """A final figure such as test_accuracy, of each finished run that has it."""
        return self.values(lambda run: run.final(key))

    def mean_of(self, key: str) -> float | None:
        """The mean of a final figure over the finished runs."""
        values = self.finals(key)
        return fmean(values) if values else None


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def group_runs(runs: Iterable[Run]) -> list[RunGroup]:
    """Group runs by their settings, in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(settings_key(run.config), []).append(run)
    members = list(groups.values())
    names = label_all([runs[0].config for runs in members])
    return [RunGroup(label, runs) for label, runs in zip(names, members, strict=True)]


def differing(configs: Sequence[RunConfig]) -> list[str]:
    """The names of settings that differ, except IGNORED_FIELDS."""
    if not configs:
        return []
    first = configs[0]
    return [
        item.name
        for item in dataclasses.fields(RunConfig)
        if item.name not in IGNORED_FIELDS
        and any(getattr(config, item.name) != getattr(first, item.name) for config in configs)
    ]


def label_all(configs: Sequence[RunConfig]) -> list[str]:
    """A label for each, of the settings that differ; equal only for equal settings.

    Where several settings differ, values that most configurations share are omitted.
    """
    names = differing(configs)
    if not names:
        return [f"{config.model_text} on {config.data}, {config.strategy}" for config in configs]
    usual = {name: _usual([getattr(config, name) for config in configs]) for name in names}
    several = len(names) > 1
    return [
        label(
            config,
            [
                name
                for name in names
                if name == "strategy" or not several or getattr(config, name) != usual[name]
            ],
        )
        for config in configs
    ]


def _usual(values: Sequence[Any]) -> Any:
    """The value of more than half; `...` if there is none, since None is a valid setting."""
    most = max(values, key=values.count)
    return most if values.count(most) * 2 > len(values) else ...


def label(config: RunConfig, names: Sequence[str]) -> str:
    """The label of a configuration, from these settings."""
    order = ("strategy", "options", *(one for one in names if one not in _LABELED_FIELDS))
    parts = [setting_text(name, getattr(config, name)) for name in order if name in names]
    if "nnodes" in names or "nproc_per_node" in names:
        parts.insert(min(1, len(parts)), describe_workers(config))
    if "batch_size" in names or "batch_per_worker" in names:
        parts.append(f"batch {config.global_batch_size}")
    return ", ".join(filter(None, parts)) or config.strategy


_LABELED_FIELDS = (
    "strategy",
    "options",
    "nnodes",
    "nproc_per_node",
    "batch_size",
    "batch_per_worker",
)


def describe_workers(config: RunConfig) -> str:
    """The number of workers, and of nodes if there are several."""
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    return workers if config.nnodes == 1 else f"{workers} on {config.nnodes} nodes"


def setting_text(name: str, value: Any) -> str:
    """A setting as short as is clear in a legend."""
    if name in ("strategy", "model", "data", "optimizer", "precision", "schedule"):
        return str(value)
    if name in ("options", "model_options"):
        return " ".join(f"{key}={item}" for key, item in value.items())
    if name == "checkpoint_every":
        return "no checkpoints" if value == "never" else f"checkpoint every {value}"
    plain = name.replace("_", "-")
    if isinstance(value, bool):
        return plain if value else f"no {plain}"
    return f"{plain} {value_text(value)}"


def value_text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def settings_key(config: RunConfig) -> str:
    """Equal for runs that repeat one another, and only for these."""
    return key(config, IGNORED_FIELDS)
