"""Agreement of all workers before training: configuration, run folder, and errors on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, first_value
from paceline.config import RunConfig, fields, flag_of
from paceline.errors import ConfigError, UsageError
from paceline.launch.messages import check_run_name
from paceline.records import LOCATION_FIELDS, RunFolder

T = TypeVar("T")

NODE_FIELDS = (*LOCATION_FIELDS, "node_rank", "data_dir", "threads")
"""Fields that may differ from node to node."""


def config_mismatches(
    own: dict[str, Any], first: dict[str, Any], noun: str, number: int
) -> list[str]:
    """A line for each setting in which a rank or node differs from the first one."""
    return [
        f"{flag_of(item.name)}: {noun} {number} was started with {own[item.name]!r},"
        f" {noun} 0 with {first[item.name]!r}: use the same value for all"
        for item in fields()
        if item.name not in NODE_FIELDS and own[item.name] != first[item.name]
    ]


def agree_on_config(config: RunConfig, communicator: Communicator) -> None:
    """ConfigError on all ranks if a rank has other settings than rank 0. Collective."""
    first = broadcast_json(communicator, config.to_dict())
    problems = config_mismatches(config.to_dict(), first, "rank", communicator.rank)

    def check() -> None:
        if problems:
            raise ConfigError(problems)

    run_collectively(communicator, check)


def run_collectively(communicator: Communicator, action: Callable[[], T]) -> T:
    """Run an action that may raise UsageError; if it does on one rank, all raise it. Collective.

    So no rank waits for one that has left, or reports only that it has.
    """
    if communicator.world_size == 1:
        return action()
    message, result = None, None
    try:
        result = action()
    except UsageError as error:
        message = str(error)
    first = first_value(communicator, message)
    if first is not None:
        raise ConfigError.from_text(first)
    return result  # type: ignore[return-value]  # the action succeeded on all ranks


def agree_on_folder(
    communicator: Communicator,
    stack: ExitStack,
    create: Callable[[], RunFolder],
    open_or_create: Callable[[str], RunFolder],
) -> RunFolder:
    """Rank 0 creates the run folder; the others use it or create one of the same name. Collective.

    Rank 0 locks it until `stack` closes.
    """

    def make() -> RunFolder | None:
        if communicator.rank:
            return None
        folder = create()
        stack.enter_context(folder.locked())
        return folder

    made = run_collectively(communicator, make)
    if made and communicator.world_size == 1:
        return made
    name = check_run_name(broadcast_json(communicator, made.id if made else None))
    return run_collectively(communicator, lambda: made or open_or_create(name))


def shares_first_folder(folder: RunFolder, communicator: Communicator) -> bool:
    """Whether this worker and rank 0 share the run folder. Collective."""
    identity = folder.identity()
    return bool(broadcast_json(communicator, identity) == identity)
