"""What communication should take: the model that every algorithm's `cost()` speaks in.

A message of `n` bytes takes `latency + n / bandwidth`, and summing `n` bytes into a buffer takes `n
/ reduce_bytes_per_second`. A worker can send one message and receive another at the same time, at
full bandwidth each. What several workers send at once does not slow any of them down, unless they
send to the same one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Network:
    latency_seconds: float
    """From the start of a send of next to nothing until it has been received."""
    bandwidth_bytes_per_second: float
    """Of one worker's link, in each direction."""
    reduce_bytes_per_second: float | None = None
    """How fast a worker adds a received buffer to its own; None: in no time."""

    def seconds(self, messages: float, moved_bytes: float, reduced_bytes: float = 0.0) -> float:
        """The time of messages that follow one another, with the bytes they move and sum in all."""
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
    """Of one operation."""

    seconds: float
    """From its start until every worker has the result."""
    bytes_sent: float
    """By the worker that sends most."""
    messages: int
    """Sent by the worker that sends most of them."""
