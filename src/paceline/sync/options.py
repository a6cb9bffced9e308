"""A strategy's `-o key=value` options, checked against its constructor."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping

from paceline.config import convert
from paceline.errors import ConfigError, UserCodeError
from paceline.sync import STRATEGIES
from paceline.sync.strategy import Strategy


def create_strategy(name: str, options: Mapping[str, str]) -> Strategy:
    """Build a registered or a user's own strategy, refusing options that it does not have."""
    chosen = STRATEGIES.load(name)
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)):
        raise UserCodeError(
            f"strategy {name!r}: must be a subclass of paceline.sync.strategy.Strategy"
        )
    known = inspect.signature(chosen).parameters
    types = typing.get_type_hints(chosen.__init__)
    problems, values = [], {}
    for key, text in options.items():
        if key not in known:
            offer = f"it has {', '.join(known)}" if known else "it has none"
            problems.append(f"-o {key}: strategy {name} has no such option; {offer}")
            continue
        try:
            values[key] = convert(types.get(key, str), text)
        except ValueError as error:
            problems.append(f"-o {key}: must be {error}, got {text!r}")
    if problems:
        raise ConfigError(problems)
    return chosen(**values)
