"""What a worker and a server say to one another: requests of a few numbers, tensors, and JSON.

Every worker has a communicator of its own with every server, a pair in which the server is rank 0;
so a server can wait for each of its workers in a thread of its own. Nothing received can run
anything.
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
"""In a request or an answer; those that are not needed are 0."""

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""What weights may be; a message names one by its place here."""

SERVER, WORKER = 0, 1
"""The ranks in a pair."""


class Request(IntEnum):
    """The first number of what a worker sends; the others are its arguments."""

    BEGIN = 0
    """(elements, which of `DTYPES`), the first weights -> an answer when they are there."""
    STEP = 1
    """(learning rate, whether to clip), a gradient -> new weights, once all workers have asked.
    To clip: -> (sum of squares), then the factor to multiply by -> new weights."""
    PUSH = 2
    """(learning rate, whether that is DONE), a gradient -> (updates since this worker's last
    pull)."""
    PULL = 3
    """-> the weights."""
    CLAIM = 4
    """(first, total, checkpoint_every, stop, finish) -> (action, iteration, part, ahead, seconds
    waited), the weights."""
    DONE = 5
    """What was claimed is part of the weights at all servers now. No answer."""
    SAVE = 6
    """-> the optimizer's state: JSON, then its tensors."""
    LOAD = 7
    """JSON, tensors -> an answer when they are there."""
    BARRIER = 8
    """-> an answer when all workers have asked for it."""
    FINISHED = 9
    """This worker may leave without that being a failure. No answer."""


class ServerConnection:
    """One end of a pair."""

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
            raise self._named(error) from None

    def start_receive(self, tensor: Tensor, kind: str) -> Work:
        try:
            return self._communicator.recv(tensor, self._peer, kind)
        except PeerError as error:
            raise self._named(error) from None

    def wait(self, works: Sequence[Work]) -> None:
        """The last first, which should be an answer: a peer that is gone is noticed at once by who
        waits to receive, and may not be by who waits to send."""
        try:
            for work in reversed(works):
                work.wait()
        except PeerError as error:
            raise self._named(error) from None

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

    def _named(self, error: PeerError) -> PeerError:
        """In a pair, ranks say nothing; the cause is what follows the last colon."""
        own, peer = self._names
        return PeerError(f"{own}: {peer}: {str(error).rpartition(': ')[2]}")
