"""Options of the strategies of a plan, validated as `paceline train` validates them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping

from paceline.comm.algorithms import ALGORITHMS
from paceline.config.conversion import convert_options, option_types
from paceline.errors import ConfigError, bare, shown, suggest
from paceline.plan.codec_cost import PLANNED_CODECS
from paceline.strategies import STRATEGIES, create_strategy


def check_options(strategies: Iterable[str], options: Mapping[str, str]) -> None:
    """ConfigError if an option is invalid, or if none of the strategies has it."""
    if not options:
        return
    known: set[str] = set()
    for strategy in strategies:
        known.update(option_types(STRATEGIES.load(strategy)))
        own_options(strategy, options)
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(
            [
                f"-o {bare(key)}: none of the strategies has this option:"
                f" {suggest(key, sorted(known)) if known else 'they have none'}"
                for key in unknown
            ]
        )


def own_options(strategy: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that the strategy has; ConfigError if a value is invalid.

    Without options, torch is not imported.
    """
    if not options:
        return {}
    known = option_types(STRATEGIES.load(strategy))
    own = {key: text for key, text in options.items() if key in known}
    algorithm, codec = own.get("algorithm", "library"), own.get("codec", "none")
    if algorithm not in ALGORITHMS:
        names = ", ".join(ALGORITHMS.names())
        raise ConfigError([f"-o algorithm: no plan for {shown(algorithm)}: choose from {names}"])
    if codec not in ("none", *PLANNED_CODECS):
        raise ConfigError(
            [
                f"-o codec: no plan for {shown(codec)}: choose from {', '.join(PLANNED_CODECS)}, or"
                " compare short runs with and without it"
            ]
        )
    create_strategy(strategy, own)
    return own


def is_modeled(options: Mapping[str, str], plannable_codecs: Collection[str]) -> bool:
    """Whether runs with these options do what the model describes."""
    is_codec_modeled = options.get("codec", "none") in ("none", *plannable_codecs)
    return options.get("algorithm", "library") in ALGORITHMS and is_codec_modeled


def without_defaults(strategy: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options that differ from the strategy's defaults, so that jobs compare."""
    if not options or strategy not in STRATEGIES:
        return dict(options)
    class_ = STRATEGIES.load(strategy)
    try:
        values = convert_options(f"strategy {strategy}", class_, options)
    except ConfigError:
        # Recorded by another version.
        return dict(options)
    parameters = inspect.signature(class_).parameters
    defaults = {key: parameters[key].default for key in values} | dict(STRATEGIES.preset(strategy))
    return {key: text for key, text in options.items() if values[key] != defaults[key]}
