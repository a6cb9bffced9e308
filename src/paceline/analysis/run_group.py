"""Repeats of a configuration as one group, and labels that distinguish groups."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any

from paceline.analysis.run import Run
from paceline.config import RunSettings

IGNORED_FIELDS = frozenset(
    (
        "seed", "name", "out", "data_dir", "node_rank", "master_addr", "master_port", "trace",
        "tensorboard", "sample_seconds", "rendezvous_seconds", "timeout_seconds", "max_restarts",
        "resident_limit_mib", "checkpoint_keep", "metrics",
    )
)  # fmt: skip
"""Settings in which repeats may differ."""


MAX_COMMAND = 60
"""Characters of a command in a label."""

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
    def measured(self) -> list[Run]:
        """Runs with phases: the finished ones; if there are none, profiles that did not finish."""
        return self.finished or [
            run for run in self.runs if run.settings.kind == "profile" and run.workers
        ]

    @property
    def shown(self) -> list[Run]:
        """The finished runs; if there are none, the others."""
        return self.finished or self.runs

    @cached_property
    def timed(self) -> list[Run]:
        """Finished runs with step times, which can be ranked."""
        return [run for run in self.finished if run.timing is not None]

    @property
    def settings(self) -> RunSettings:
        return self.runs[0].settings

    @property
    def workers(self) -> int:
        return self.settings.workers

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
    def samples_in_iteration(self) -> float | None:
        """Mean over the run, which includes the smaller last batch of an epoch.

        None if neither the batch size nor the number of samples is known.
        """
        for run in self.timed:
            if run.iterations and run.result is not None and run.result["samples"]:
                return float(run.result["samples"]) / run.iterations
        batch_size = self.settings.global_batch_size
        return None if batch_size is None else float(batch_size)

    @property
    def batch_size(self) -> int | None:
        """The global batch size: as set, else as counted; None if it is unknown."""
        if self.settings.config is not None:
            return self.settings.global_batch_size
        return None if self.samples_in_iteration is None else round(self.samples_in_iteration)

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


def metric_names(groups: Iterable[RunGroup], ignoring: Collection[str] = ()) -> list[str]:
    """Metrics that some run has, besides accuracy, which is a final figure of its own."""
    results = (run.result for group in groups for run in group.shown)
    names = dict.fromkeys(name for one in results if one for name in one.get("metrics", {}))
    return [name for name in names if name not in ("accuracy", *ignoring)]


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def scales_to_samples(groups: Sequence[RunGroup], *, always: bool = False) -> list[float] | None:
    """Factors from time per iteration to time per 1,000 samples, where batch sizes differ.

    None where they are equal, unless `always`, or one is unknown: then iterations are compared.
    """
    is_same = len({group.batch_size for group in groups}) < 2 and not always
    samples = known(group.samples_in_iteration for group in groups)
    if is_same or len(samples) < len(groups):
        return None
    return [1000 / one for one in samples]


def group_runs(runs: Iterable[Run]) -> list[RunGroup]:
    """Group runs by their settings, in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(settings_key(run.settings), []).append(run)
    members = list(groups.values())
    names = label_all([_common(runs) for runs in members])
    return [RunGroup(label, runs) for label, runs in zip(names, members, strict=True)]


def _common(repeats: Sequence[Run]) -> RunSettings:
    """The settings of repeats, without names in which they differ."""
    settings = repeats[0].settings
    if len({one.settings.get("name") for one in repeats}) == 1 or settings.config is not None:
        return settings
    values = {name: value for name, value in settings.values.items() if name != "name"}
    return RunSettings(settings.kind, values)


def differing(settings: Sequence[RunSettings]) -> list[str]:
    """The names of settings that differ, except IGNORED_FIELDS.

    A setting that runs of another kind do not have is not a difference; their kind is.
    """
    names = dict.fromkeys(name for one in settings for name in ("kind", *one.values))
    return [name for name in names if name not in IGNORED_FIELDS and _differs(name, settings)]


def _differs(name: str, settings: Sequence[RunSettings]) -> bool:
    kinds = {one.kind for one in settings if name == "kind" or name in one.values}
    values = [one.get(name) for one in settings if one.kind in kinds]
    return any(value != values[0] for value in values)


def label_all(settings: Sequence[RunSettings]) -> list[str]:
    """A label for each, of the settings that differ; equal only for equal settings.

    Where several settings differ, values that most configurations share are omitted.
    """
    names = differing(settings)
    programs = _programs(settings)
    if not names:
        return [_title(one, program) for one, program in zip(settings, programs, strict=True)]
    usual = {name: _usual([one.get(name) for one in settings]) for name in names}
    several = len(names) > 1
    return [
        label(
            one,
            [
                name
                for name in names
                if name in _ALWAYS_LABELED or not several or one.get(name) != usual[name]
            ],
            program,
        )
        for one, program in zip(settings, programs, strict=True)
    ]


def _programs(settings: Sequence[RunSettings]) -> list[str]:
    """A short name of each program; the command where the short names of two are the same."""
    commands: dict[str | None, set[str]] = {}
    for one in settings:
        commands.setdefault(one.program, set()).add(value_text(one.get("command")))
    return [
        _shortened(one.program or "")
        if len(commands[one.program]) == 1
        else _shortened(value_text(one.get("command")))
        for one in settings
    ]


def _usual(values: Sequence[Any]) -> Any:
    """The value of more than half; `...` if there is none, since None is a valid setting."""
    most = max(values, key=values.count)
    return most if values.count(most) * 2 > len(values) else ...


def label(settings: RunSettings, names: Sequence[str], program: str = "") -> str:
    """The label of a configuration, from these settings; `program` stands for its command."""
    order = ("command", "strategy", "options", *(one for one in names if one not in _LABELED))
    parts = [
        program if name == "command" else setting_text(name, settings.get(name))
        for name in order
        if name in names and name in settings.values
    ]
    if {"nnodes", "nproc_per_node", "world_size"} & set(names):
        parts.insert(min(1, len(parts)), describe_workers(settings))
    if "batch_size" in names or "batch_per_worker" in names:
        parts.append(f"batch {settings.global_batch_size}")
    text = ", ".join(filter(None, parts)) or _title(settings, program)
    return f"{settings.kind}: {text}" if "kind" in names and settings.kind != "train" else text


def _title(settings: RunSettings, program: str) -> str:
    """What was trained, and with which strategy if known."""
    return ", ".join(filter(None, (program or settings.task, settings.strategy)))


_ALWAYS_LABELED = ("kind", "command", "strategy")
_LABELED = (
    "kind",
    "command",
    "strategy",
    "options",
    "nnodes",
    "nproc_per_node",
    "world_size",
    "batch_size",
    "batch_per_worker",
)


def describe_workers(settings: RunSettings) -> str:
    """The number of workers, and of nodes if there are several."""
    workers = f"{settings.workers} worker{'s' * (settings.workers > 1)}"
    return workers if settings.nnodes == 1 else f"{workers} on {settings.nnodes} nodes"


def setting_text(name: str, value: Any) -> str:
    """A setting as short as is clear in a legend."""
    if name in ("strategy", "model", "data", "optimizer", "precision", "schedule"):
        return str(value)
    if name == "command":
        return _shortened(value_text(value))
    if name in ("options", "model_options"):
        return " ".join(f"{key}={item}" for key, item in value.items())
    if name == "checkpoint_every":
        return "no checkpoints" if value == "never" else f"checkpoint every {value}"
    plain = name.replace("_", "-")
    if isinstance(value, bool):
        return plain if value else f"no {plain}"
    return f"{plain} {value_text(value)}"


def known_text(settings: RunSettings, name: str) -> str:
    """The value of a setting for a table; a dash if it is unknown."""
    is_known = name == "kind" or name in settings.values
    return value_text(settings.get(name)) if is_known else "-"


def value_text(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        # Only a command is a list.
        return shlex.join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _shortened(text: str) -> str:
    """Without the middle, since commands differ in their script or their last arguments."""
    half = MAX_COMMAND // 2
    return text if len(text) <= MAX_COMMAND else f"{text[:half]}…{text[-half:]}"


def settings_key(settings: RunSettings) -> str:
    """Equal for runs that repeat one another, and only for these."""
    return settings.key(IGNORED_FIELDS)
