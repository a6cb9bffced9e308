"""Convert text and YAML scalars to typed values, for flags, study files and `-o` options."""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from paceline.errors import ConfigError, bare, shown, suggest

LARGEST_INTEGER = 2**63 - 1
"""The largest int64."""
MOST_DIGITS = len(str(LARGEST_INTEGER))

Switch = Literal["auto", "on", "off"]
"""A setting that a run may choose by itself. YAML and older records have true or false."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that a setting accepts."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    """An exclusive lower limit."""
    below: float | None = None
    """An exclusive upper limit."""

    def allow(self, value: float) -> bool:
        """Return whether a number is finite and within the limits."""
        return (
            not (isinstance(value, float) and not math.isfinite(value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.maximum is None or value <= self.maximum)
        )

    def texts(self) -> list[str]:
        """Such as "at least 1" and "at most 1024"."""
        limits = (
            ("at least", self.minimum),
            ("above", self.above),
            ("below", self.below),
            ("at most", self.maximum),
        )
        return [
            f"{word} {limit if isinstance(limit, int) else format(limit, 'g')}"
            for word, limit in limits
            if limit is not None
        ]

    def __str__(self) -> str:
        return " and ".join(self.texts())


def check_option(name: str, value: float, **limits: float) -> None:
    """Raise a ConfigError if an option of a strategy or codec is outside its limits."""
    accepted = Limits(**limits)
    if not accepted.allow(value):
        raise ConfigError([f"-o {name}: must be {accepted}, got {shown(value)}"])


class TooLargeError(ValueError):
    """An integer that is too large for any setting."""


_WHOLE = re.compile(r"[+-]?[0-9_]+")


def convert(kind: Any, raw: Any) -> Any:
    """Convert text or a YAML scalar to a type; a ValueError has the valid values."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _convert_limited(arguments[0], arguments[1:], raw)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, raw)
    if origin is Literal:
        if kind == Switch and str(raw).lower() in ("true", "false"):
            return "on" if _convert_bool(raw) else "off"
        if raw in arguments:
            return raw
        raise ValueError(_alternatives(arguments))
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


def _alternatives(values: tuple[Any, ...]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def option_types(factory: Callable[..., object], given: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a strategy, codec or model: names and types of its parameters.

    A parameter without an annotation has the type of its default. `given` are the parameters that
    are not options.
    """
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    return {
        item.name: _option_type(item)
        for item in parameters
        if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) and item.name not in given
    }


def _option_type(parameter: inspect.Parameter) -> Any:
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    kind = type(parameter.default)
    return kind if kind in (bool, int, float) else str


def convert_options(
    owner: str,
    factory: Callable[..., object],
    options: Mapping[str, str],
    *,
    flag: str = "-o",
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Convert options from text to arguments of `factory`; reports all problems together.

    If it takes `**kwargs`, any option is valid.
    """
    if not options:
        return {}
    known = option_types(factory, given)
    parameters = inspect.signature(factory).parameters.values()
    takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)
    problems, arguments = [], {}
    for name, text in options.items():
        if name not in known and (name in given or not takes_any):
            problems.append(
                f"{flag} {bare(name)}: {owner} has no such option; {_offer(name, known)}"
            )
            continue
        try:
            arguments[name] = convert(known.get(name, bool | int | float | str), text)
        except ValueError as error:
            problems.append(f"{flag} {bare(name)}: must be {error}, got {shown(text)}")
    if problems:
        raise ConfigError(problems)
    return arguments


def _offer(name: str, known: Collection[str]) -> str:
    if not known:
        return "it has none"
    hint = suggest(name, known)
    near = f" ({hint})" if hint.endswith("?") else ""
    return f"it has {', '.join(known)}{near}"


def _convert_limited(kind: Any, limits: tuple[Any, ...], raw: Any) -> Any:
    """Of `Annotated[float, Limits(...)]`: the value must be within the limits."""
    value = convert(kind, raw)
    for limit in limits:
        if isinstance(limit, Limits) and not limit.allow(value):
            raise ValueError(str(limit))
    return value


def _convert_union(arguments: tuple[Any, ...], raw: Any) -> Any:
    if type(None) in arguments and (raw is None or raw == "none"):
        return None
    errors = []
    for kind in arguments:
        if kind is not type(None):
            try:
                return convert(kind, raw)
            except ValueError as error:
                errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise ValueError(", ".join(map(str, errors)))


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
        # Checked first, because Python rejects text of more than 4,300 digits.
        is_long = isinstance(raw, str) and len(raw.strip()) > 2 * MOST_DIGITS
        value = None if is_long and _WHOLE.fullmatch(raw.strip()) else int(raw)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a whole number") from None
    if value is None or abs(value) >= 10**MOST_DIGITS:
        raise TooLargeError(f"a whole number of at most {MOST_DIGITS} digits")
    return value


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
