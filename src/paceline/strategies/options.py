"""Creates strategies by name, with their `-o key=value` options."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config.conversion import convert_options
from paceline.errors import PacelineError, UserCodeError, error_line
from paceline.strategies import STRATEGIES
from paceline.strategies.strategy import ServerStrategy, Strategy

RENAMED = {
    "refusals": "check",
    "attach": "setup",
    "consensus": "eval_weights",
    "claim": "next_assignment",
    "lockstep": "synchronous",
    "equal": "replicas_equal",
    "most_workers": "max_world_size",
    "holds_all_weights": "checkpoint.has_full_weights",
    "model_state": "checkpoint.model_state_dict",
    "load_model_state": "checkpoint.load_model_state_dict",
    "optimizer_state": "checkpoint.optimizer_state_dict",
    "load_optimizer_state": "checkpoint.load_optimizer_state_dict",
    "notes": "meter.take",
    "account": "meter.summary",
    "settle_accounts": "meter.settle",
}
"""Former names of methods and attributes of strategies."""


def create_strategy(name: str, options: Mapping[str, str]) -> Strategy:
    """Create a registered or user-defined strategy; unknown options are errors."""
    chosen = STRATEGIES.load(name)
    if not (isinstance(chosen, type) and issubclass(chosen, Strategy)):
        raise UserCodeError(f"strategy {name!r}: must be a subclass of paceline.Strategy")
    # A method under its former name would never be called: training would be silently wrong.
    former = [each for each in RENAMED if hasattr(chosen, each)]
    if former:
        changes = ", ".join(f"{each} to {RENAMED[each]}" for each in former)
        raise UserCodeError(f"strategy {name!r} uses names of an earlier version: rename {changes}")
    try:
        given = convert_options(f"strategy {name}", chosen, options)
        strategy = chosen(**{**STRATEGIES.preset(name), **given})
    except PacelineError:
        raise
    except Exception as error:
        raise UserCodeError(f"strategy {name!r} could not be built: {error_line(error)}") from error
    has_servers = hasattr(strategy, "serve") or not strategy.synchronous
    if has_servers and not isinstance(strategy, ServerStrategy):
        raise UserCodeError(
            f"strategy {name!r}: servers and asynchronous training need a subclass of"
            " paceline.strategies.strategy.ServerStrategy"
        )
    return strategy
