"""A worker's requests to all servers, each of which holds a shard of the flat weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.buffers import chunk
from paceline.comm.work import Work
from paceline.strategies.parameter_server.protocol import DTYPES, NUMBERS, Request, ServerConnection
from paceline.strategies.parameter_server.server import TENSOR, State, describe
from paceline.strategies.strategy import ACTIONS, Assignment, AssignmentRequest

CLIP_EPSILON = 1e-6
"""The epsilon of torch.nn.utils.clip_grad_norm_."""


class ServerClient:
    """Sends requests to all servers at the same time; server 0 also assigns work."""

    def __init__(
        self, connections: Sequence[ServerConnection], weights: Tensor, gradients: Tensor
    ) -> None:
        """`weights` and `gradients` are flat tensors of the same layout."""
        self._connections = connections
        count = len(connections)
        self._weights = [chunk(weights, count, index) for index in range(count)]
        self._gradients = [chunk(gradients, count, index) for index in range(count)]

    def begin(self) -> None:
        """Send the initial weights. Called by one worker, before any other request."""
        for connection, weights in zip(self._connections, self._weights, strict=True):
            connection.send_numbers(Request.BEGIN, weights.numel(), DTYPES.index(weights.dtype))
            connection.send(weights, "parameters")
            connection.receive_numbers()

    def step(self, rate: float, clip_norm: float | None) -> None:
        """Update the weights with the sum of all workers' gradients. Collective."""
        started = self._send_gradients(Request.STEP, rate, clip_norm is not None)
        if clip_norm is not None:
            squares = sum(self._replies(started))
            factor = min(1.0, clip_norm / (math.sqrt(squares) + CLIP_EPSILON))
            started = [[connection.start_numbers(factor)] for connection in self._connections]
        for connection, works, weights in zip(
            self._connections, started, self._weights, strict=True
        ):
            works.append(connection.start_receive(weights, "parameters"))
        self._wait(started)

    def push(self, rate: float) -> int:
        """Update the weights with this worker's gradient.

        Returns the number of updates by others since its last pull.
        """
        has_one_server = len(self._connections) == 1
        first, *_ = self._replies(self._send_gradients(Request.PUSH, rate, has_one_server))
        if not has_one_server:
            self.done()
        return int(first)

    def done(self) -> None:
        """Report that this worker's assignment is done."""
        self._connections[0].send_numbers(Request.DONE)

    def pull(self) -> None:
        """Receive the current weights."""
        self._pull_from(0)

    def _pull_from(self, first: int) -> None:
        connections, shards = self._connections[first:], self._weights[first:]
        started = [
            [
                connection.start_numbers(Request.PULL),
                connection.start_receive(weights, "parameters"),
            ]
            for connection, weights in zip(connections, shards, strict=True)
        ]
        for connection, works in zip(connections, started, strict=True):
            connection.wait(works)

    def next_assignment(self, request: AssignmentRequest) -> Assignment:
        """Receive the next assignment and the current weights."""
        first = self._connections[0]
        first.send_numbers(
            Request.ASSIGN,
            request.first,
            request.total,
            request.checkpoint_every,
            request.stop,
            request.finish,
        )
        action, iteration, part, ahead, waited_seconds, *_ = first.receive_numbers()
        first.receive(self._weights[0], "parameters")
        self._pull_from(1)
        return Assignment(
            int(iteration), int(part), ACTIONS[int(action)], int(ahead), waited_seconds
        )

    def barrier(self) -> None:
        """Wait for all workers, without a timeout, because they may wait for a slow server."""
        self._connections[0].send_numbers(Request.BARRIER)
        self._connections[0].receive_numbers()

    def finish(self) -> None:
        """Announce that this worker will disconnect."""
        for connection in self._connections:
            connection.send_numbers(Request.FINISHED)

    def save(self) -> State:
        """Receive the optimizer state of all weights, as flat tensors and scalars."""
        shards: list[State] = []
        for connection, weights in zip(self._connections, self._weights, strict=True):
            connection.send_numbers(Request.SAVE)
            state: State = {}
            for name, value in connection.receive_json().items():
                state[name] = value
                if value == TENSOR:
                    state[name] = tensor = torch.empty_like(weights, device="cpu")
                    connection.receive(tensor, "parameters")
            shards.append(state)
        return {name: _join([shard[name] for shard in shards]) for name in shards[0]}

    def load(self, state: State) -> None:
        """Send an optimizer state of all weights. Called by one worker."""
        for index, connection in enumerate(self._connections):
            connection.send_numbers(Request.LOAD)
            connection.send_json(describe(state))
            for value in state.values():
                if isinstance(value, Tensor):
                    connection.send(chunk(value, len(self._connections), index), "parameters")
            connection.receive_numbers()

    def _send_gradients(self, *request: float) -> list[list[Work]]:
        return [
            [connection.start_numbers(*request), connection.start_send(gradient, "gradients")]
            for connection, gradient in zip(self._connections, self._gradients, strict=True)
        ]

    def _replies(self, started: Sequence[list[Work]]) -> list[float]:
        """Return the first number of each server's reply."""
        replies = torch.empty(len(self._connections), NUMBERS, dtype=torch.float64)
        for connection, works, reply in zip(self._connections, started, replies, strict=True):
            works.append(connection.start_receive(reply, "control"))
        self._wait(started)
        return [float(reply[0]) for reply in replies]

    def _wait(self, started: Sequence[Sequence[Work]]) -> None:
        for connection, works in zip(self._connections, started, strict=True):
            connection.wait(works)


def _join(values: Sequence[Tensor | float | None]) -> Tensor | float | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.cat(tensors) if tensors else values[0]
