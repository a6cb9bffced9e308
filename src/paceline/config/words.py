"""Settings as words of a command line: the way back from `from_mapping`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.config.option import flag_of, option_of
from paceline.config.run_config import RunConfig, fields


def words_of(values: Mapping[str, Any]) -> list[str]:
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


def values_to_type(config: RunConfig) -> dict[str, Any]:
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
