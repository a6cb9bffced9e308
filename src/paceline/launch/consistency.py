"""What all workers must agree on before they train; who is refused is refused on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_json
from paceline.config import RunConfig, fields, flag_of
from paceline.errors import ConfigError, UsageError
from paceline.records import LOCATION_FIELDS

T = TypeVar("T")

NODE_FIELDS = (*LOCATION_FIELDS, "node_rank", "data_dir", "threads")
"""Fields that may differ from node to node."""


def config_mismatches(
    own: dict[str, Any], first: dict[str, Any], noun: str, number: int
) -> list[str]:
    """A line for each setting that a worker or node does not have in common with the first."""
    return [
        f"{flag_of(item.name)}: {noun} {number} was started with {own[item.name]!r},"
        f" {noun} 0 with {first[item.name]!r}: give all the same"
        for item in fields()
        if item.name not in NODE_FIELDS and own[item.name] != first[item.name]
    ]


def agree_on_config(config: RunConfig, communicator: Communicator) -> None:
    """Refuse workers that were started with other settings than the first one. Collective."""
    first = broadcast_json(communicator, config.to_dict())
    problems = config_mismatches(config.to_dict(), first, "rank", communicator.rank)

    def refuse() -> None:
        if problems:
            raise ConfigError(problems)

    run_collectively(communicator, refuse)


def run_collectively(communicator: Communicator, action: Callable[[], T]) -> T:
    """Do something that a worker may find to be refused; all are then, by its words. Collective.

    So nobody waits for one who has left, and nobody sees only that it has.
    """
    if communicator.world_size == 1:
        return action()
    refusal, result = None, None
    try:
        result = action()
    except UsageError as error:
        refusal = str(error)
    refusals = gather_json(communicator, refusal)
    told = broadcast_json(communicator, next(filter(None, refusals or []), None))
    if told is not None:
        raise ConfigError.from_text(told)
    return result  # type: ignore[return-value]  # the action succeeded, here as everywhere
