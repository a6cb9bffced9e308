"""Create configs from flags, study files or records, and convert configs to flags."""

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
    """Create the config of an existing run, whose values may be outside the limits of new input."""
    return from_mapping({}, recorded=values)


def from_mapping(values: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> RunConfig:
    """Create a config from text or YAML values by field name; reports all problems together.

    `recorded` are settings of an existing run, which `values` override; they may be outside the
    limits of new input.
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
            except _InvalidValueError as invalid:
                flag = option_of(known[name]).short or flag_of(name)
                expected, limits = invalid.expected, option_of(known[name]).input_limits
                if isinstance(invalid.__cause__, TooLargeError) and limits.maximum is not None:
                    expected = str(limits)
                problems.append(f"{flag}: must be {expected}, got {shown(invalid.raw)}")
            else:
                # An empty list is valid in a file, but not as the value of a flag.
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
        # --hosts and --cluster imply the number of nodes.
        machines = len(converted.get("hosts", ())) or nodes_in(converted.get("cluster"))
        converted |= {"nnodes": machines} if machines else {}
    return RunConfig(**converted)


def _hint(name: str) -> str:
    hint = suggest(name, (item.name for item in fields()))
    # The list of all settings would fill a screen.
    return hint if hint.startswith("did") else "see `paceline train --help`"


class _InvalidValueError(Exception):
    def __init__(self, expected: str, raw: Any) -> None:
        super().__init__(expected)
        self.expected = expected
        self.raw = raw


def _convert(kind: Any, raw: Any) -> Any:
    """Like `convert`; of repeated key=value flags, the error has the invalid one."""
    parts = raw if isinstance(raw, list) and kind == dict[str, str] else [raw]
    values = []
    for part in parts:
        try:
            values.append(convert(kind, part))
        except ValueError as error:
            raise _InvalidValueError(str(error), part) from error
    if parts is raw:
        return {key: value for pairs in values for key, value in pairs.items()}
    return values[0]


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """Return the flags for these settings, which are text or values of a config."""
    argv: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            argv.append(flag_of(name if value else f"no_{name}"))
        else:
            argv += [argument for text in _texts(value) for argument in _flag(name, text)]
    return argv


def _texts(value: Any) -> list[str]:
    """Return the values of the flag, one for each occurrence."""
    if isinstance(value, dict):
        return [f"{key}={text}" for key, text in value.items()]
    if isinstance(value, list):
        return value
    return [",".join(value) if isinstance(value, tuple) else str(value)]


def _flag(name: str, text: str) -> list[str]:
    flag = _SHORT.get(name) or flag_of(name)
    # argparse takes a separate value that begins with a dash for another flag.
    return [f"{flag_of(name)}={text}"] if text.startswith("-") else [flag, text]


_SHORT = {item.name: option_of(item).short for item in fields()}


def non_default_values(config: RunConfig) -> dict[str, Any]:
    """Return the settings that differ from the defaults and are not implied by others."""
    default = RunConfig()
    values = {item.name: getattr(config, item.name) for item in fields()}
    implied = _implied(config)
    return {
        name: value
        for name, value in values.items()
        if value != getattr(default, name) and name not in implied
    }


def _implied(config: RunConfig) -> set[str]:
    """Settings that --hosts, --cluster or --elastic imply."""
    if config.cluster:
        return {"nnodes", "node_rank", "master_addr"}
    if config.hosts:
        first = config.hosts[0].rpartition("@")[2]
        address = re.escape(config.master_addr)
        is_first = re.fullmatch(rf"\[?{address}\]?(:\d+)?", first) is not None
        return {"nnodes", "node_rank", *(["master_addr"] if is_first else [])}
    return {"nnodes"} if config.elastic else set()
