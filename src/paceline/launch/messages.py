"""Validation of values that other nodes put into the store.

Anyone who can reach the store's port can write to it, so every value may be malformed or forged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import RunError, UsageError, few_lines, one_line
from paceline.records import is_number

MESSAGE_BYTES_MAX = 1 << 20
"""Far more than any message needs; files are sent in parts (record_collection.py)."""
NAME_BYTES_MAX = 255
"""The limit of file systems."""
DEPTH_MAX = 32
"""Far deeper than any message is nested."""


Kinds = Mapping[str, type | tuple[type, ...]]
"""Types of an object's values by key."""


class MalformedError(RunError):
    """Another node sent a value that no node of this version sends."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"malformed {what} received from another node ({why}): run the same paceline version"
            " on all nodes, and nothing else on --master-port"
        )


def decode(received: bytes, what: str, bytes_max: int | None = MESSAGE_BYTES_MAX) -> Any:
    """Decode a JSON value; `what` names it in errors. `bytes_max`: None if the size was checked."""
    if bytes_max is not None and len(received) > bytes_max:
        raise MalformedError(what, f"{len(received)} bytes")
    try:
        return json.loads(received)
    except (ValueError, RecursionError):
        raise MalformedError(what, "not JSON") from None


def check_fields(value: object, what: str, kinds: Kinds) -> Any:
    """Check that an object has exactly these keys and types (`object`: any), and finite numbers."""
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise MalformedError(what, "other keys than expected")
    for name, kind in kinds.items():
        item = value[name]
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if object in allowed:
            continue
        is_bool_for_number = isinstance(item, bool) and bool not in allowed
        is_bad_number = (
            isinstance(item, (int, float)) and not isinstance(item, bool) and not is_number(item)
        )
        if is_bool_for_number or is_bad_number or not isinstance(item, allowed):
            raise MalformedError(what, f"bad value of {name}")
    return value


def clean(value: Any, what: str, depth: int = DEPTH_MAX) -> Any:
    """A JSON value with finite numbers and single-line strings at every level."""
    if depth == 0:
        raise MalformedError(what, "nested too deeply")
    if isinstance(value, dict):
        return {one_line(key): clean(item, what, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item, what, depth - 1) for item in value]
    if isinstance(value, str):
        return one_line(value)
    if value is None or isinstance(value, bool) or is_number(value):
        return value
    raise MalformedError(what, "a number that is not finite or too large")


def clean_cause(text: str, exit_code: int) -> str:
    """The cause that another process reported: one line, or a few for several invalid settings."""
    return few_lines(text) if exit_code == UsageError.exit_code else one_line(text)


def is_file_name(value: object) -> bool:
    """Whether it is a plain file name, without a path."""
    return (
        isinstance(value, str)
        and 0 < len(value.encode(errors="replace")) <= NAME_BYTES_MAX
        and value.isprintable()
        and not value.startswith(".")
        and "/" not in value
    )


def check_run_name(value: object) -> str:
    """Check the name of the run folder, which node 0 chose."""
    if not isinstance(value, str) or not is_file_name(value):
        raise MalformedError("run name", f"{value!r:.80} is not a plain folder name")
    return value
