"""Configs from text (flags), YAML scalars (study files) or records, and configs as flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.config import cluster_spec
from paceline.config.conversion import TooLargeError, convert
from paceline.config.run_config import RunConfig, fields, type_of
from paceline.config.schema import check_alone, check_input, flag_of, nodes_in, option_of
from paceline.errors import ConfigError, shown, suggest


def from_record(values: Mapping[str, Any]) -> RunConfig:
    """The config of an existing run, also where its values are outside the ranges of new input."""
    return from_mapping({}, recorded=values)


def from_mapping(values: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> RunConfig:
    """A config from text or YAML values by field name; every problem is reported at once.

    `recorded`: settings of an existing run that `values` replace; what was valid when it was
    recorded stays valid.
    """
    changed, values = values, {**(recorded or {}), **values}
    known = {item.name: item for item in fields()}
    problems = [
        f"unknown setting {shown(name)}: {_hint(name)}" for name in values if name not in known
    ]
    converted: dict[str, Any] = {}
    for name, raw in values.items():
        if name in known:
            try:
                converted[name] = _convert(type_of(known[name]), raw)
            except _UnfitError as unfit:
                flag = option_of(known[name]).short or flag_of(name)
                wanted, limits = unfit.wanted, option_of(known[name]).input_limits
                if isinstance(unfit.__cause__, TooLargeError) and limits.maximum is not None:
                    wanted = str(limits)
                problems.append(f"{flag}: must be {wanted}, got {shown(unfit.raw)}")
            else:
                # An empty list is how files say none; a flag that is given is meant to say some.
                if converted[name] == () and isinstance(raw, str):
                    problems.append(f"{flag_of(name)}: must not be empty, got {shown(raw)}")
    for name, value in converted.items():
        check = check_input if name in changed else check_alone
        problems += check(known[name], value)
    if "cluster" not in changed and converted.get("cluster"):
        try:
            cluster_spec.parse_recorded(converted["cluster"])
        except ValueError as error:
            problems.append(f"--cluster: must be {error}")
    if problems:
        raise ConfigError(problems)
    if "nnodes" not in values:
        # Machines that are named or described need not be counted as well.
        machines = len(converted.get("hosts", ())) or nodes_in(converted.get("cluster"))
        converted |= {"nnodes": machines} if machines else {}
    return RunConfig(**converted)


def _hint(name: str) -> str:
    hint = suggest(name, (item.name for item in fields()))
    # All of them would fill a screen.
    return hint if hint.startswith("did") else "`paceline train --help` has them all"


class _UnfitError(Exception):
    def __init__(self, wanted: str, raw: Any) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.raw = raw


def _convert(kind: Any, raw: Any) -> Any:
    """As `convert` does; of pairs that were given one by one, the one that is wrong is told."""
    given = raw if isinstance(raw, list) and kind == dict[str, str] else [raw]
    values = []
    for part in given:
        try:
            values.append(convert(kind, part))
        except ValueError as error:
            raise _UnfitError(str(error), part) from error
    if given is raw:
        return {key: value for pairs in values for key, value in pairs.items()}
    return values[0]


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """The flags that give these settings, be they text as a user gave it or a config's values."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag_of(name if value else f"no_{name}"))
        else:
            words += [word for text in _texts(value) for word in _flag(name, text)]
    return words


def _texts(value: Any) -> list[str]:
    """One for each time that the flag has to be given."""
    if isinstance(value, dict):
        return [f"{key}={text}" for key, text in value.items()]
    if isinstance(value, list):
        return value
    return [",".join(value) if isinstance(value, tuple) else str(value)]


def _flag(name: str, text: str) -> list[str]:
    flag = _SHORT.get(name) or flag_of(name)
    # What begins with a dash, argparse would take for another flag.
    return [f"{flag_of(name)}={text}"] if text.startswith("-") else [flag, text]


_SHORT = {item.name: option_of(item).short for item in fields()}


def non_default_values(config: RunConfig) -> dict[str, Any]:
    """What a user has to type for this config: all that is neither the default nor follows."""
    plain = RunConfig()
    values = {item.name: getattr(config, item.name) for item in fields()}
    following = _following(config)
    return {
        name: value
        for name, value in values.items()
        if value != getattr(plain, name) and name not in following
    }


def _following(config: RunConfig) -> set[str]:
    """Settings that machines which are named or described bring with them."""
    if config.cluster:
        return {"nnodes", "node_rank", "master_addr"}
    if config.hosts:
        first = config.hosts[0].rpartition("@")[2]
        address = re.escape(config.master_addr)
        is_first = re.fullmatch(rf"\[?{address}\]?(:\d+)?", first) is not None
        return {"nnodes", "node_rank", *(["master_addr"] if is_first else [])}
    # As many take part in an elastic run as there are.
    return {"nnodes"} if config.elastic else set()
