"""`paceline.join`: bring the workers of a user's own program together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.launch import environment
from paceline.launch.validation import check_strategy
from paceline.launch.worker import connect_workers
from paceline.strategies.strategy import ServerStrategy
from paceline.training.device import choose_device
from paceline.training.session import Session

_JOINS = itertools.count()
"""A program may join several times, one after the other; every time is a meeting of its own."""


@contextmanager
def join(
    strategy: str = "overlap",
    *,
    communicator: str = "torch",
    rendezvous_seconds: float = 60.0,
    timeout_seconds: float = 300.0,
    **options: Any,
) -> Iterator[Session]:
    """Meet the other workers that torchrun, srun or paceline has started; alone otherwise.

    `options` are the strategy's. At the end of the block every worker has the final weights.
    """
    place = environment.detect() or SINGLE_PROCESS
    config = from_mapping(
        {
            "strategy": strategy,
            "options": options,
            "communicator": communicator,
            "rendezvous_seconds": rendezvous_seconds,
            "timeout_seconds": timeout_seconds,
            "nnodes": place.nnodes,
            "nproc_per_node": place.local_world_size,
        }
    )
    chosen = check_strategy(config)
    if isinstance(chosen, ServerStrategy):
        raise UsageError(
            f"strategy {strategy}: is not for loops of one's own, whose workers go in step:"
            " choose another, or train with `paceline train`"
        )
    device = choose_device(config, place.local_rank)
    name = f"join-{next(_JOINS)}"
    with connect_workers(config, place, name, is_agreed=False) as connected:
        team = Session(config, place, connected, chosen, device)
        yield team
        # Not after an exception: the others learn of it because the connections are closed.
        team.finish()
        connected.barrier().wait()
