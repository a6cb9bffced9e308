"""The data connection of a worker and a server, which is cut when its heartbeats are missing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from paceline.comm.communicator import OperationContext, no_answer
from paceline.comm.process_groups import PeerErrors
from paceline.comm.torch_distributed import GlooPointToPointWork, TorchCommunicator
from paceline.errors import PeerError

PATIENCE = timedelta(days=7)
"""How long to wait for an answer while heartbeats arrive."""


class _PatientTransfer(GlooPointToPointWork):
    def _block(self) -> None:
        with PeerErrors(self._context, self._timeout_seconds):
            self._handle.wait(PATIENCE)


class Pair(TorchCommunicator):
    """Its timeout is that for connecting; afterwards heartbeats decide (heartbeat.py)."""

    point_to_point_work = _PatientTransfer

    silent_seconds: float | None = None
    """How long the peer had been silent when it was lost; None while it is not."""
    lost_at: float = 0.0
    """Unix time."""

    def lose(self, silent_seconds: float) -> None:
        """The peer is lost: whatever waits for it fails now. For any thread."""
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
            cause = no_answer(silent_seconds)
        return OperationContext.failed(self, cause)
