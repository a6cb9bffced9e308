"""Text and YAML scalars as values of a type: how flags, study files and `-o` options are read."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from paceline.errors import ConfigError


def convert(kind: Any, raw: Any) -> Any:
    """Text or a YAML scalar as a value of a field's type; ValueError says what would do."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, raw)
    if origin is Literal:
        if raw in arguments:
            return raw
        raise ValueError(" or ".join(map(str, arguments)))
    if origin is tuple:
        parts = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(parts, list | tuple):
            raise ValueError("a list")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    if origin is dict:
        return _convert_pairs(raw)
    if kind is bool:
        return _convert_bool(raw)
    if kind is int:
        return _convert_int(raw)
    if kind is float:
        return _convert_float(raw)
    return str(raw)


def option_types(factory: Callable[..., object]) -> dict[str, Any]:
    """The `-o` options of a strategy or codec: the arguments of its constructor, with types."""
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    return {
        item.name: str if item.annotation is item.empty else item.annotation
        for item in parameters
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    }


def convert_options(
    owner: str, factory: Callable[..., object], options: Mapping[str, str]
) -> dict[str, Any]:
    """Options given as text, as arguments of the owner's constructor; all problems at once."""
    known = option_types(factory)
    problems, arguments = [], {}
    for name, text in options.items():
        if name not in known:
            offer = f"it has {', '.join(known)}" if known else "it has none"
            problems.append(f"-o {name}: {owner} has no such option; {offer}")
            continue
        try:
            arguments[name] = convert(known[name], text)
        except ValueError as error:
            problems.append(f"-o {name}: must be {error}, got {text!r}")
    if problems:
        raise ConfigError(problems)
    return arguments


def _convert_union(arguments: tuple[Any, ...], raw: Any) -> Any:
    if type(None) in arguments and (raw is None or raw == "none"):
        return None
    wanted = []
    for kind in arguments:
        if kind is not type(None):
            try:
                return convert(kind, raw)
            except ValueError as error:
                wanted.append(str(error))
    raise ValueError(", ".join(wanted))


def _convert_bool(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    if str(raw).lower() in ("true", "false"):
        return str(raw).lower() == "true"
    raise ValueError("true or false")


def _convert_int(raw: Any) -> int:
    try:
        if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
            raise ValueError
        return int(raw)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a whole number") from None


def _convert_float(raw: Any) -> float:
    try:
        if isinstance(raw, bool):
            raise ValueError
        value = float(raw)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a number") from None
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def _convert_pairs(raw: Any) -> dict[str, str]:
    if isinstance(raw, Mapping):
        return {str(key): str(value) for key, value in raw.items()}
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list | tuple):
        raise ValueError("key=value pairs")
    pairs = {}
    for text in texts:
        key, equals, value = str(text).partition("=")
        if not key or not equals:
            raise ValueError("key=value")
        pairs[key.strip()] = value.strip()
    return pairs
