"""A config from text (flags) or YAML scalars (study files), both read the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline import cluster_spec
from paceline.config.checks import check_alone, nodes_in
from paceline.config.option import flag_of, option_of
from paceline.config.run_config import RunConfig, fields, type_of
from paceline.errors import ConfigError, nearest, shown
from paceline.values import convert


def from_mapping(values: Mapping[str, Any]) -> RunConfig:
    """A config from text or YAML values by field name; every problem is reported at once."""
    known = {item.name: item for item in fields()}
    problems = [
        f"no such setting {shown(name)}: {_hint(name)}" for name in values if name not in known
    ]
    converted: dict[str, Any] = {}
    for name, raw in values.items():
        if name in known:
            try:
                converted[name] = _convert(type_of(known[name]), raw)
            except _UnfitError as unfit:
                flag = option_of(known[name]).short or flag_of(name)
                problems.append(f"{flag}: must be {unfit.wanted}, got {shown(unfit.raw)}")
            else:
                # An empty list is how files say none; a flag that is given is meant to say some.
                if converted[name] == () and isinstance(raw, str):
                    problems.append(f"{flag_of(name)}: must not be empty, got {shown(raw)}")
    for name, value in converted.items():
        problems += check_alone(known[name], value)
    if converted.get("cluster"):
        try:
            cluster_spec.parse(converted["cluster"])
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
    hint = nearest(name, (item.name for item in fields()))
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
            raise _UnfitError(str(error), part) from None
    if given is raw:
        return {key: value for pairs in values for key, value in pairs.items()}
    return values[0]
