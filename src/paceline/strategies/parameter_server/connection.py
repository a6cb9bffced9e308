"""The data connection between a worker and a server, which closes if heartbeats stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from paceline.comm.communicator import OperationContext, timeout_message
from paceline.comm.process_groups import PeerErrorTranslator
from paceline.comm.torch_distributed import GlooPointToPointWork, TorchCommunicator
from paceline.errors import PeerError

TRANSFER_TIMEOUT = timedelta(days=7)
"""Timeout of a transfer while heartbeats arrive."""


class _HeartbeatWork(GlooPointToPointWork):
    def _block(self) -> None:
        with PeerErrorTranslator(self._context, self._timeout_seconds):
            self._handle.wait(TRANSFER_TIMEOUT)


class Pair(TorchCommunicator):
    """A two-rank communicator whose transfers wait while heartbeats arrive (heartbeat.py).

    Its timeout applies to connecting only.
    """

    point_to_point_work = _HeartbeatWork

    silent_seconds: float | None = None
    """Seconds without a heartbeat until the peer was lost; None if it is not lost."""
    lost_at: float = 0.0
    """Unix time at which the peer was lost."""

    def lose(self, silent_seconds: float) -> None:
        """Fail all transfers, because the peer is lost. Thread-safe."""
        self.silent_seconds, self.lost_at = silent_seconds, time.time()
        self.close()

    def context(self, name: str, peers: Sequence[int]) -> OperationContext:
        plain = super().context(name, peers)
        return _Operation(plain.rank, plain.name, plain.peers, self)


@dataclass(frozen=True, slots=True)
class _Operation(OperationContext):
    pair: Pair

    def failed(self, cause: str) -> PeerError:
        silent_seconds = self.pair.silent_seconds
        if silent_seconds is not None:
            cause = timeout_message(silent_seconds)
        return OperationContext.failed(self, cause)
