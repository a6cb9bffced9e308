"""The settings of one cell, laid over each other: base, scale, part, and the values of the axes.

A setting is a field of RunConfig, `options.KEY` or `cluster.KEY`. Each remembers who gave it.
"""

from __future__ import annotations

import re
from typing import Any

from paceline.config import RunConfig, fields, from_mapping
from paceline.data import DATASETS
from paceline.errors import ConfigError, UnknownNameError, shown, suggest
from paceline.models import MODELS
from paceline.strategies import STRATEGIES
from paceline.study.yaml_nodes import Diagnostics, YamlNode

CLUSTER_KEYS = ("nodes", "cpus", "bandwidth", "latency", "slow")
GIVEN_BY_THE_STUDY = ("out", "name")
ALTERNATIVES = (("epochs", "iterations"), ("batch_size", "batch_per_worker"))
"""Two ways to say one thing: the later layer's counts."""

FIELDS = tuple(item.name for item in fields())
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")


def is_setting(key: str) -> bool:
    head, dot, tail = key.partition(".")
    if dot:
        return (head == "options" and bool(tail)) or (head == "cluster" and tail in CLUSTER_KEYS)
    return key in FIELDS and key not in GIVEN_BY_THE_STUDY


def check_key(key: str, place: YamlNode, problems: Diagnostics) -> bool:
    """Whether a key is a setting; if not, that is told at `place`."""
    if is_setting(key):
        return True
    head, _, tail = key.partition(".")
    if key in GIVEN_BY_THE_STUDY:
        problems.add(place, f"{shown(key)} is the study's to choose: leave it out")
    elif head == "cluster":
        known = [f"cluster.{name}" for name in CLUSTER_KEYS]
        problems.add(place, f"no such setting {shown(key)}: {suggest(key, known)}")
    elif tail:
        problems.add(
            place, f"no such setting {shown(key)}: only options.KEY and cluster.KEY have a dot"
        )
    else:
        near = suggest(key, FIELDS)
        hint = near if near.startswith("did") else "docs/config.md lists all of them"
        problems.add(place, f"no such setting {shown(key)}: {hint}")
    return False


class Settings:
    """What a cell's layers say so far."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._options: dict[str, str] = {}
        self._cluster: dict[str, str] = {}
        self._origins: dict[str, YamlNode] = {}

    def copy(self) -> Settings:
        twin = Settings()
        for name in vars(twin):
            setattr(twin, name, dict(getattr(self, name)))
        return twin

    def apply(self, layer: dict[str, YamlNode]) -> None:
        """Lay settings over those that are there; null takes a setting back to its default."""
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
        if head in ("options", "cluster"):
            self._origins |= {f"{head}.{name}": value for name, value in node.items()}
        if head == "options":
            self._options = _laid(self._options, tail, node)
        elif head == "cluster":
            self._cluster = _laid(self._cluster, tail, node)
        elif node.content is None:
            self._values.pop(key, None)
        else:
            self._values[key] = node.plain()

    def mapping(self) -> dict[str, Any]:
        """What `config.from_mapping` takes."""
        values = dict(self._values)
        if self._options:
            values["options"] = dict(self._options)
        if self._cluster:
            values["cluster"] = ",".join(f"{key}={text}" for key, text in self._cluster.items())
        return values

    def check(self, place: YamlNode, cell: str, problems: Diagnostics) -> RunConfig | None:
        """The config; what is wrong with it is told where it was given, else at `place`."""
        for name, check in (
            ("model", MODELS.check),
            ("data", DATASETS.check),
            ("strategy", STRATEGIES.check),
        ):
            try:
                if name in self._values:
                    check(str(self._values[name]))
            except UnknownNameError as error:
                problems.add(self._origins.get(name, place), str(error))
        try:
            return from_mapping(self.mapping())
        except ConfigError as error:
            for text in error.problems:
                self.tell(text, place, cell, problems)
            return None

    def tell(self, text: str, place: YamlNode, cell: str, problems: Diagnostics) -> None:
        """A problem that names flags, at the line of the first setting it names."""
        text = re.sub(r"^-o (\w+)", r"--options.\1", text)
        named = [flag.replace("-", "_") for flag in _FLAG.findall(text)]
        if text.startswith("--options."):
            named = [text[2:].partition(":")[0], "options"]
        origin = next((self._origins[name] for name in named if name in self._origins), None)
        plain = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
        head, colon, rest = plain.partition(": ")
        if origin is not None and colon and head in (origin.path[-1], ".".join(origin.path[-2:])):
            plain = rest
        if origin is not None:
            problems.add(origin, plain)
        else:
            problems.add(place, plain, cell)


def _laid(pairs: dict[str, str], key: str, node: YamlNode) -> dict[str, str]:
    """Pairs with one of them replaced; without a key with all that the node gives."""
    if key:
        rest = {name: text for name, text in pairs.items() if name != key}
        return rest if node.content is None else {**pairs, key: as_text(node.plain())}
    if node.content is None:
        return {}
    if node.is_mapping:
        given = {name: as_text(value) for name, value in node.plain().items()}
        return {**pairs, **given}
    texts = node.plain() if isinstance(node.content, list) else str(node.plain()).split(",")
    split = (str(text).partition("=") for text in texts)
    return {name.strip(): text.strip() for name, _, text in split}


def as_text(value: Any) -> str:
    """A value as flags, names and labels show it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return str(value)
