"""Alpha-beta cost model of communication, used by the `cost()` of every algorithm.

A message of `n` bytes takes `latency + n / bandwidth`, and summing `n` bytes into a buffer takes
`n / reduce_bytes_per_second`. A worker can send one message and receive another at the same time,
each at full bandwidth. Messages of different workers do not slow each other down unless they have
the same receiver.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    """Parameters of the network between workers."""

    latency_seconds: float
    """Time from the start of an empty send until it is received."""
    bandwidth_bytes_per_second: float
    """Bandwidth of one worker's link, in each direction."""
    reduce_bytes_per_second: float | None = None
    """Rate at which a worker adds a received buffer to its own; None means infinitely fast."""

    def seconds(self, messages: float, moved_bytes: float, reduced_bytes: float = 0.0) -> float:
        """Return the time of sequential messages that move and reduce the given bytes in total."""
        reducing = (
            reduced_bytes / self.reduce_bytes_per_second if self.reduce_bytes_per_second else 0.0
        )
        return (
            messages * self.latency_seconds
            + moved_bytes / self.bandwidth_bytes_per_second
            + reducing
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of one operation."""

    seconds: float
    """Time from the start until every worker has the result."""
    bytes_sent: float
    """Bytes sent by the worker that sends the most bytes."""
    messages: int
    """Messages sent by the worker that sends the most messages."""
