"""The settings of a cell as layers: base, scale, part and the values of the axes.

A setting is a field of RunConfig, `options.KEY`, `model_options.KEY` or `cluster.KEY`. Each keeps
its location in the study file.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.config import RunConfig, fields, flag_of, from_mapping, option_of, type_of
from paceline.data import DATASETS
from paceline.errors import ConfigError, UnknownNameError, shown, suggest
from paceline.models import MODELS
from paceline.strategies import STRATEGIES
from paceline.study.yaml_nodes import Diagnostics, YamlNode
from paceline.training import METRICS

CLUSTER_KEYS = ("nodes", "cpus", "bandwidth", "latency", "slow")
SET_BY_THE_STUDY = ("out", "name")
ALTERNATIVES = (("epochs", "iterations"), ("batch_size", "batch_per_worker"))
"""Mutually exclusive settings: one replaces the other of an earlier layer."""

FIELDS = tuple(item.name for item in fields())
OPTION_FLAGS = {
    item.name: option_of(item).short or flag_of(item.name)
    for item in fields()
    if type_of(item) == dict[str, str]
}
"""Fields with key=value pairs, whose keys a study can set one by one, and their flags."""
_FLAG = re.compile(r"--([a-z][a-z0-9_-]*)")


def is_setting(key: str) -> bool:
    head, dot, tail = key.partition(".")
    if dot:
        return bool(tail) and (head in OPTION_FLAGS or (head == "cluster" and tail in CLUSTER_KEYS))
    return key in FIELDS and key not in SET_BY_THE_STUDY


def check_key(key: str, location: YamlNode, problems: Diagnostics) -> bool:
    """Return whether a key is a setting; if not, add a problem at `location`."""
    if is_setting(key):
        return True
    head, _, tail = key.partition(".")
    if key in SET_BY_THE_STUDY:
        problems.add(location, f"{shown(key)} is set by the study: omit it")
    elif head == "cluster":
        known = [f"cluster.{name}" for name in CLUSTER_KEYS]
        problems.add(location, f"unknown setting {shown(key)}: {suggest(key, known)}")
    elif tail:
        dotted = ", ".join(f"{name}.KEY" for name in OPTION_FLAGS)
        problems.add(
            location, f"unknown setting {shown(key)}: only {dotted} and cluster.KEY have a dot"
        )
    else:
        near = suggest(key, FIELDS)
        hint = near if near.startswith("did") else "see docs/config.md"
        problems.add(location, f"unknown setting {shown(key)}: {hint}")
    return False


class Settings:
    """The settings of the layers applied so far."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._pairs: dict[str, dict[str, str]] = {}
        """The key=value pairs of options, model options and cluster."""
        self._origins: dict[str, YamlNode] = {}

    def copy(self) -> Settings:
        copied = Settings()
        for name in vars(copied):
            setattr(copied, name, dict(getattr(self, name)))
        return copied

    def apply(self, layer: dict[str, YamlNode]) -> None:
        """Override settings; null resets a setting to its default."""
        for one, other in ALTERNATIVES:
            if one in layer and other not in layer:
                self._values.pop(other, None)
            if other in layer and one not in layer:
                self._values.pop(one, None)
        if "schedule" in layer and "lr_steps" not in layer:
            self._values.pop("lr_steps", None)
        for key, node in layer.items():
            self._set(key, node)

    def _set(self, key: str, node: YamlNode) -> None:
        head, _, tail = key.partition(".")
        self._origins[key] = self._origins[head] = node
        if head in (*OPTION_FLAGS, "cluster"):
            self._origins |= {f"{head}.{name}": value for name, value in node.items()}
            self._pairs[head] = _override(self._pairs.get(head, {}), tail, node)
        elif node.content is None:
            self._values.pop(key, None)
        else:
            self._values[key] = node.plain()

    def mapping(self) -> dict[str, Any]:
        """Return the settings for `config.from_mapping`."""
        values = {
            **self._values,
            **{name: dict(pairs) for name, pairs in self._pairs.items() if pairs},
        }
        if "cluster" in values:
            values["cluster"] = ",".join(f"{key}={text}" for key, text in values["cluster"].items())
        return values

    def check(self, location: YamlNode, cell: str, problems: Diagnostics) -> RunConfig | None:
        """Return the config; None if it is invalid, with problems at its settings or `location`."""
        for name, check in (
            ("model", MODELS.check),
            ("data", DATASETS.check),
            ("strategy", STRATEGIES.check),
        ):
            try:
                if name in self._values:
                    check(str(self._values[name]))
            except UnknownNameError as error:
                problems.add(self._origins.get(name, location), str(error))
        try:
            config = from_mapping(self.mapping())
        except ConfigError as error:
            for text in error.problems:
                self.report(text, location, cell, problems)
            return None
        for metric in config.metrics:
            try:
                METRICS.check(metric)
            except UnknownNameError as error:
                problems.add(self._origins.get("metrics", location), str(error))
        return config

    def report(self, text: str, location: YamlNode, cell: str, problems: Diagnostics) -> None:
        """Add a problem with flags as setting names, at the line of the first setting it names."""
        named = [flag.replace("-", "_") for flag in _FLAG.findall(text)]
        for name, flag in OPTION_FLAGS.items():
            if found := re.match(rf"{flag} (\w+)", text):
                named = [f"{name}.{found[1]}", name]
                text = f"--{name}.{found[1]}{text[found.end() :]}"
        origin = next((self._origins[name] for name in named if name in self._origins), None)
        plain = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
        head, colon, rest = plain.partition(": ")
        if origin is not None and colon and head in (origin.path[-1], ".".join(origin.path[-2:])):
            plain = rest
        if origin is not None:
            problems.add(origin, plain)
        else:
            problems.add(location, plain, cell)


def _override(pairs: dict[str, str], key: str, node: YamlNode) -> dict[str, str]:
    """Return `pairs` with one key replaced, or with all keys of the node if `key` is empty."""
    if key:
        rest = {name: text for name, text in pairs.items() if name != key}
        return rest if node.content is None else {**pairs, key: as_text(node.plain())}
    if node.content is None:
        return {}
    if node.is_mapping:
        return {**pairs, **{name: as_text(value) for name, value in node.plain().items()}}
    texts = node.plain() if isinstance(node.content, list) else str(node.plain()).split(",")
    split = (str(text).partition("=") for text in texts)
    return {name.strip(): text.strip() for name, _, text in split}


def as_text(value: Any) -> str:
    """Format a value as in flags, names and labels."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value)
