"""A strategy by name, with its `-o key=value` options."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config.conversion import convert_options
from paceline.errors import PacelineError, UserCodeError, error_line
from paceline.strategies import STRATEGIES
from paceline.strategies.strategy import Strategy

RENAMED = {
    "refusals": "check",
    "attach": "setup",
    "consensus": "eval_weights",
    "claim": "next_assignment",
    "lockstep": "synchronous",
    "equal": "replicas_equal",
    "most_workers": "max_world_size",
}
"""Methods and attributes of strategies by the names that they had before."""


def create_strategy(name: str, options: Mapping[str, str]) -> Strategy:
    """Build a registered or a user's own strategy, refusing options that it does not have."""
    chosen = STRATEGIES.load(name)
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)):
        raise UserCodeError(f"strategy {name!r}: must be a subclass of paceline.Strategy")
    # Under its former name a method would never be called, and training would be wrong silently.
    former = [each for each in RENAMED if hasattr(chosen, each)]
    if former:
        changes = ", ".join(f"{each} to {RENAMED[each]}" for each in former)
        raise UserCodeError(f"strategy {name!r} uses names of an earlier version: rename {changes}")
    try:
        given = convert_options(f"strategy {name}", chosen, options)
        return chosen(**{**STRATEGIES.preset(name), **given})
    except PacelineError:
        raise
    except Exception as error:
        raise UserCodeError(f"strategy {name!r} could not be built: {error_line(error)}") from error
