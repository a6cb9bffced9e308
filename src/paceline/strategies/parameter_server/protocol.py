"""Messages between a worker and a server: requests of a few numbers, tensors and JSON.

A two-rank communicator connects each worker with each server, which is rank 0. A server can
therefore wait for each worker in a separate thread. No received data is executed or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.work import Work
from paceline.errors import PeerError

NUMBERS = 8
"""Length of a request or reply; unused numbers are 0."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Supported dtypes of weights; messages contain the index."""

SERVER, WORKER = 0, 1
"""Ranks in the communicator of a worker and a server."""


class Request(IntEnum):
    """First number of a worker's message; the others are arguments (arguments -> reply)."""

    BEGIN = 0
    """(number of elements, index in `DTYPES`), initial weights -> acknowledgment."""
    STEP = 1
    """(learning rate, whether to clip), gradient -> new weights, after all workers' requests.
    With clipping: -> (sum of squares); then (factor) -> new weights."""
    PUSH = 2
    """(learning rate, whether it implies DONE), gradient -> (updates since the last pull)."""
    PULL = 3
    """-> weights."""
    ASSIGN = 4
    """(first, total, checkpoint_every, stop, finish) -> (action, iteration, part, ahead, seconds
    waited), weights."""
    DONE = 5
    """All servers have applied the update of the worker's assignment. No reply."""
    SAVE = 6
    """-> optimizer state: JSON, then its tensors."""
    LOAD = 7
    """Optimizer state: JSON, then its tensors -> acknowledgment."""
    BARRIER = 8
    """-> acknowledgment, after all workers' requests."""
    FINISHED = 9
    """The worker will disconnect, which is not a failure. No reply."""


class ServerConnection:
    """One end of the connection between a worker and a server."""

    def __init__(self, communicator: Communicator, own_name: str, peer_name: str) -> None:
        self._communicator = communicator
        self._peer = WORKER if communicator.rank == SERVER else SERVER
        self._names = (own_name, peer_name)

    def send_numbers(self, *numbers: float) -> None:
        self.wait([self.start_numbers(*numbers)])

    def start_numbers(self, *numbers: float) -> Work:
        padded = [*numbers, *[0.0] * (NUMBERS - len(numbers))]
        return self.start_send(torch.tensor(padded, dtype=torch.float64), "control")

    def receive_numbers(self) -> list[float]:
        numbers = torch.empty(NUMBERS, dtype=torch.float64)
        self.receive(numbers, "control")
        return numbers.tolist()

    def send(self, tensor: Tensor, kind: str) -> None:
        self.wait([self.start_send(tensor, kind)])

    def receive(self, tensor: Tensor, kind: str) -> None:
        self.wait([self.start_receive(tensor, kind)])

    def start_send(self, tensor: Tensor, kind: str) -> Work:
        try:
            return self._communicator.send(tensor, self._peer, kind)
        except PeerError as error:
            raise self._rename(error) from None

    def start_receive(self, tensor: Tensor, kind: str) -> Work:
        try:
            return self._communicator.recv(tensor, self._peer, kind)
        except PeerError as error:
            raise self._rename(error) from None

    def wait(self, works: Sequence[Work]) -> None:
        """Wait in reverse order, that is, for the reply first.

        If the peer is lost, a receive fails immediately, but a send may not.
        """
        try:
            for work in reversed(works):
                work.wait()
        except PeerError as error:
            raise self._rename(error) from None

    def send_json(self, value: Any) -> None:
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        self.send_numbers(payload.numel())
        self.send(payload, "control")

    def receive_json(self) -> Any:
        payload = torch.empty(int(self.receive_numbers()[0]), dtype=torch.uint8)
        self.receive(payload, "control")
        return json.loads(payload.numpy().tobytes())

    def close(self) -> None:
        self._communicator.close()

    def _rename(self, error: PeerError) -> PeerError:
        """Replace the ranks of the two-rank communicator with the names of the processes."""
        own, peer = self._names
        return PeerError(f"{own}: {peer}: {str(error).rpartition(': ')[2]}")
