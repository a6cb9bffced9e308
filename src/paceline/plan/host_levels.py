"""Collectives of several workers per host: rounds within the hosts, and rounds between them.

Workers of a host have neighboring ranks and share the link of the host. The library's collectives
of a hierarchical communicator use both levels (comm/hierarchical.py): worker i of a host exchanges
chunk i with worker i of every other host. All other collectives ignore the hosts: a round takes as
long as its messages between hosts, if it has any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from paceline.plan.collective_times import Place
from paceline.plan.message_rounds import MESSAGE_ROUNDS, Rounds, rounds_of


@dataclass(frozen=True, slots=True)
class Level:
    """The part of a collective that is within hosts, or between them."""

    operation: str
    algorithm: str
    """Whose measured rounds these are."""
    place: Place
    rounds: tuple[Rounds, ...]
    members: int
    """Workers of one such collective."""


def levels_of(
    operation: str, algorithm: str, workers: int, hosts: int, size_bytes: float, place: Place
) -> tuple[Level, ...]:
    """The parts of a collective, one after the other; `place` is what connects the workers."""
    per_host = -(-workers // hosts)
    if hosts == 1 or per_host == 1:
        rounds = rounds_of(operation, algorithm, workers, size_bytes)
        return (Level(operation, algorithm, place, rounds, workers),)
    is_hierarchical = place.backend == "hierarchical"
    within = Place("shm" if is_hierarchical else place.backend, False, None)
    across = replace(place, backend="gloo") if is_hierarchical else place
    # Communicators ignore hosts with different numbers of workers.
    if is_hierarchical and algorithm == "library" and workers == hosts * per_host:
        return _two_levels(operation, per_host, hosts, size_bytes, within, across)
    if operation == "all_reduce" and algorithm == "root":
        # Messages from the root's own host do not use its link.
        remote_bytes = (workers - per_host) * size_bytes
        both = Rounds(2, remote_bytes, workers - 1, alternates=True, is_there_and_back=True)
        return (Level(operation, algorithm, across, (both,), workers),)
    if operation == "all_reduce" and algorithm in MESSAGE_ROUNDS:
        local, remote = _by_level(algorithm, workers, per_host)
        is_tree = algorithm == "tree"
        return tuple(
            Level(
                operation,
                algorithm,
                where,
                tuple(Rounds(1, share * size_bytes, is_there_and_back=is_tree) for share in shares),
                members,
            )
            for where, shares, members in ((within, local, per_host), (across, remote, workers))
            if shares
        )
    rounds = rounds_of(operation, algorithm, workers, size_bytes)
    return (Level(operation, algorithm, across, rounds, workers),)


def _two_levels(
    operation: str, per_host: int, hosts: int, size_bytes: float, within: Place, across: Place
) -> tuple[Level, ...]:
    """The workers of a host exchange their chunks at once: its link carries the whole tensor."""

    def level(name: str, place: Place, count: int) -> Level:
        rounds = rounds_of(name, "library", count, size_bytes)
        return Level(name, "library", place, rounds, count)

    scatter = level("reduce_scatter", within, per_host)
    gather = level("all_gather", within, per_host)
    between = level(operation, across, hosts)
    by_operation = {
        "all_reduce": (scatter, between, gather),
        "reduce_scatter": (scatter, between),
        "all_gather": (between, gather),
    }
    return by_operation.get(operation, (between,))


@cache
def _by_level(
    algorithm: str, workers: int, per_host: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Shares of the tensor that the busiest link carries in each round: within hosts, between."""
    local, remote = [], []
    for each in MESSAGE_ROUNDS[algorithm](workers):
        source, target = each.senders // per_host, each.receivers // per_host
        crosses = source != target
        if not crosses.any():
            local.append(each.share)
            continue
        busiest = max(np.bincount(hosts[crosses]).max() for hosts in (source, target))
        remote.append(float(busiest) * each.share)
    return tuple(local), tuple(remote)
