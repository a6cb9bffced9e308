"""Values that other nodes put into the store, checked before they are used.

Anyone who can reach the store's port can write to it, so every value may be malformed or forged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import RunError

MESSAGE_BYTES_MAX = 1 << 20
"""Far more than any message needs; files travel in parts of their own (store_files.py)."""
NAME_BYTES_MAX = 255
"""What file systems allow."""


Kinds = Mapping[str, type | tuple[type, ...]]
"""Types of an object's values by key."""


class MalformedError(RunError):
    """Another node sent something that no node of this version sends."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"malformed {what} received from another node ({why}): run the same paceline version"
            " on all nodes, and nothing else on --master-port"
        )


def decode(received: bytes, what: str) -> Any:
    """A JSON value; `what` names it in the error."""
    if len(received) > MESSAGE_BYTES_MAX:
        raise MalformedError(what, f"{len(received)} bytes")
    try:
        return json.loads(received)
    except (ValueError, RecursionError):
        raise MalformedError(what, "not JSON") from None


def check_fields(value: object, what: str, kinds: Kinds) -> Any:
    """An object with exactly these keys, each of its kind (`object`: any); numbers are finite."""
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise MalformedError(what, "other keys than expected")
    for name, kind in kinds.items():
        item = value[name]
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if object in allowed:
            continue
        is_flag_for_number = isinstance(item, bool) and bool not in allowed
        is_infinite = isinstance(item, float) and not math.isfinite(item)
        if is_flag_for_number or is_infinite or not isinstance(item, allowed):
            raise MalformedError(what, f"bad value of {name}")
    return value


def is_file_name(value: object) -> bool:
    """Whether it is a plain name of one file or folder, which stays where it is put."""
    return (
        isinstance(value, str)
        and 0 < len(value.encode(errors="replace")) <= NAME_BYTES_MAX
        and value.isprintable()
        and not value.startswith(".")
        and "/" not in value
    )


def check_run_name(value: object) -> str:
    """The name of the run's folder, which the first node chose."""
    if not isinstance(value, str) or not is_file_name(value):
        raise MalformedError("run name", f"{value!r:.80} is not a plain folder name")
    return value


def printable(text: str) -> str:
    """Text for a terminal, without control characters; line breaks stay."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "?" for sign in text)
