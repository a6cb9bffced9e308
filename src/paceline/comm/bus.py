"""Bus bandwidth: how fast the busiest link would have to be, at the least, for what was measured.

An operation on n bytes that takes t seconds has the algorithm bandwidth n / t. That falls as
workers are added, even on a perfect network, since more than n bytes must move. Its factor says how
many times n the busiest worker has to send or receive, whatever the algorithm; times that, the
bandwidth can be held against the link's for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda workers: 2 * (workers - 1) / workers,
    "reduce_scatter": lambda workers: (workers - 1) / workers,
    "all_gather": lambda workers: (workers - 1) / workers,
    "broadcast": lambda workers: 1.0,
    "gather": lambda workers: (workers - 1) / workers,
    "scatter": lambda workers: (workers - 1) / workers,
    "send_recv": lambda workers: 1.0,
}
"""n is the whole tensor: for gather and scatter, what the root has; for send_recv, one message."""
