"""`paceline.join`: connect the workers of a user's own training loop, and record it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline.comm.rank_info import SINGLE_PROCESS
from paceline.config import from_mapping
from paceline.errors import UsageError
from paceline.launch import environment
from paceline.launch.recorded_loop import RecordedLoop, settings_of_loop
from paceline.launch.validation import check_strategy
from paceline.launch.worker import connect_workers
from paceline.strategies.strategy import ServerStrategy
from paceline.training.device import choose_device
from paceline.training.session import Session

DEFAULT_OUT = "runs"

_JOINS = itertools.count()
"""A program may join several times; each time has its own rendezvous."""


@contextmanager
def join(
    strategy: str = "overlap",
    *,
    out: str | Path | None = DEFAULT_OUT,
    name: str | None = None,
    communicator: str = "torch",
    rendezvous_seconds: float = 60.0,
    timeout_seconds: float = 300.0,
    **options: Any,
) -> Iterator[Session]:
    """Connect to the other workers that torchrun, srun or paceline started, if any.

    The loop is recorded in the folder `out`/`name`, by default `runs/<time>-<script>-<strategy>`,
    as `paceline train` records its runs; with `out=None` it is not. Without `out` and `name`, it is
    not an error if the folder cannot be created. `options` are the strategy's.
    At the end of the block every worker has the final weights.
    """
    rank_info = environment.detect() or SINGLE_PROCESS
    config = from_mapping(
        {
            "strategy": strategy,
            "options": options,
            "communicator": communicator,
            "rendezvous_seconds": rendezvous_seconds,
            "timeout_seconds": timeout_seconds,
            "nnodes": rank_info.nnodes,
            "nproc_per_node": rank_info.local_world_size,
            **({"name": name} if name is not None else {}),
        }
    )
    chosen = check_strategy(config)
    if isinstance(chosen, ServerStrategy):
        raise UsageError(
            f"strategy {strategy}: does not support custom loops: choose a synchronous one, or"
            " train with `paceline train`"
        )
    device = choose_device(config, rank_info.local_rank)
    rendezvous = f"join-{next(_JOINS)}"
    with connect_workers(config, rank_info, rendezvous, is_agreed=False) as connected:
        session = Session(config, rank_info, connected, chosen, device)
        with ExitStack() as recorded:
            if out is not None:
                settings = settings_of_loop(config, sys.argv)
                loop = RecordedLoop(session, config, settings, rank_info, Path(out), name)
                try:
                    recorded.enter_context(loop)
                except UsageError as error:
                    # It is the same on all ranks.
                    if out != DEFAULT_OUT:
                        raise
                    if name is not None:
                        hint = "give another out, or out=None to train without records"
                        raise UsageError(f"{error}; {hint}") from None
                    if rank_info.rank == 0:
                        sys.stderr.write(f"paceline: the loop is not recorded: {error}\n")
            yield session
            # Not after an exception: the others notice it by the closed connections.
            session.finish()
            connected.barrier().wait()
