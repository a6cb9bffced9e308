"""`RunSettings`: what the records of a run say about its settings, whatever started it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any, Literal, get_args

from paceline.config.parsing import from_record
from paceline.config.run_config import RunConfig, Target, fields
from paceline.errors import ConfigError, shown

Kind = Literal["train", "join", "profile"]
"""What started a run: `paceline train`, a loop that called `paceline.join`, `paceline profile`."""

_TYPES: dict[str, type] = {
    "command": list,
    "name": str,
    "strategy": str,
    "options": dict,
    "communicator": str,
    "world_size": int,
    "nnodes": int,
}
"""Settings that a run of kind join or profile may know."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of a run; those that its records do not hold are unknown, not defaults.

    A run of kind train knows all fields of `RunConfig`. The others know only `command` (a list of
    arguments), `name`, `strategy`, `options`, `communicator`, `world_size` and `nnodes`, or fewer.
    """

    kind: Kind
    values: Mapping[str, Any]
    """What is known, by name."""
    config: RunConfig | None = None
    """Of a run of kind train."""

    @classmethod
    def of(cls, config: RunConfig) -> RunSettings:
        """The settings of `paceline train`."""
        return cls("train", {item.name: getattr(config, item.name) for item in fields()}, config)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RunSettings:
        """Of config.json or result.json; ConfigError for an invalid value."""
        kind, values = record.get("kind", "train"), record.get("config")
        if not isinstance(values, dict):
            raise ConfigError(["config is not an object"])
        if kind == "train":
            return cls.of(from_record(values))
        if kind not in get_args(Kind):
            raise ConfigError(
                [f"kind: must be one of {', '.join(get_args(Kind))}, got {shown(kind)}"]
            )
        known = {name: value for name, value in values.items() if value is not None}
        problems = [
            f"{name}: must be of type {_TYPES[name].__name__}, got {shown(value)}"
            for name, value in known.items()
            if name in _TYPES and type(value) is not _TYPES[name]
        ]
        if problems:
            raise ConfigError(problems)
        return cls(kind, known)

    def to_record(self) -> dict[str, Any]:
        """The keys `kind` and `config` of config.json and result.json."""
        values = dict(self.values) if self.config is None else self.config.to_dict()
        return {"kind": self.kind, "config": values}

    def get(self, name: str) -> Any:
        """The value of a setting, or of `kind`; None if it is unknown."""
        return self.kind if name == "kind" else self.values.get(name)

    def key(self, ignoring: Container[str] = ()) -> str:
        """Equal for settings that agree, except for those of `ignoring`."""
        values = {name: value for name, value in self.values.items() if name not in ignoring}
        return json.dumps([self.kind, values], sort_keys=True)

    @property
    def strategy(self) -> str | None:
        return self.values.get("strategy")

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the strategy."""
        options: Mapping[str, Any] = self.values.get("options", {})
        return options

    @property
    def nnodes(self) -> int:
        return int(self.values.get("nnodes", 1))

    @property
    def workers(self) -> int:
        if self.config is not None:
            return self.config.workers
        return int(self.values.get("world_size", 1))

    @property
    def global_batch_size(self) -> int | None:
        return None if self.config is None else self.config.global_batch_size

    @property
    def threads(self) -> int | None:
        """Per worker."""
        return self.values.get("threads")

    @property
    def cluster(self) -> str | None:
        return self.values.get("cluster")

    @property
    def target(self) -> Target | None:
        return None if self.config is None else self.config.target

    def slowness(self, rank: int) -> float:
        """The factor by which a worker was slowed down on purpose."""
        return 1.0 if self.config is None else self.config.slowness(rank)

    @property
    def model_text(self) -> str | None:
        """The model with its options, such as `vgg11 width=0.25`."""
        return None if self.config is None else self.config.model_text

    @property
    def data(self) -> str | None:
        return self.values.get("data")

    @property
    def script(self) -> str | None:
        """The file name or module of the program in the command, else the whole command."""
        words = self.script_words
        if not words:
            return None
        if words[0] == "-m":
            return words[1]
        return PurePath(words[0]).name if words[0].endswith(".py") else shlex.join(words)

    @property
    def script_words(self) -> list[str]:
        """The program in the command and its arguments, without what starts it if that is known."""
        command = [str(part) for part in self.values.get("command", ())]
        scripts = (index for index, part in enumerate(command) if part.endswith(".py"))
        # Launchers are modules, too: the last one is the program.
        modules = (index for index in reversed(range(len(command) - 1)) if command[index] == "-m")
        return command[next(chain(scripts, modules), 0) :]

    @property
    def program(self) -> str | None:
        """A short name of a run with a command: the one that was given, else its script."""
        return (self.values.get("name") or self.script) if "command" in self.values else None

    @property
    def task(self) -> str:
        """What was trained: model and data, else the script. Times compare within a task only."""
        if self.config is not None:
            return f"{self.config.model_text} on {self.config.data}"
        return self.script or f"unknown task of kind {self.kind}"

    @property
    def data_or_task(self) -> str:
        """Losses and accuracies compare for the same data, or for the same task if unknown."""
        return self.data or self.task
