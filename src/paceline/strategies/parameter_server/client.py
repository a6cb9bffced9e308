"""A worker's view of all servers: one shard of the flat weights at each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.buffers import chunk
from paceline.comm.work import Work
from paceline.strategies.parameter_server.assignments import QueuedAssignment
from paceline.strategies.parameter_server.protocol import DTYPES, NUMBERS, Request, ServerConnection
from paceline.strategies.parameter_server.server import TENSOR, State, described
from paceline.strategies.strategy import ACTIONS, Assignment, AssignmentRequest

CLIP_EPSILON = 1e-6
"""As in torch's clip_grad_norm_."""


class ServerClient:
    """Asks all servers at the same time. The first of them also deals the work."""

    def __init__(
        self, links: Sequence[ServerConnection], weights: Tensor, gradients: Tensor
    ) -> None:
        """Weights and gradients are flat tensors of the same layout."""
        self._links = links
        count = len(links)
        self._weights = [chunk(weights, count, number) for number in range(count)]
        self._gradients = [chunk(gradients, count, number) for number in range(count)]

    def begin(self) -> None:
        """Give the servers these weights; one worker does so, before anybody asks for them."""
        for link, weights in zip(self._links, self._weights, strict=True):
            link.send_numbers(Request.BEGIN, weights.numel(), DTYPES.index(weights.dtype))
            link.send(weights, "parameters")
            link.receive_numbers()

    def step(self, rate: float, clip_norm: float | None) -> None:
        """Update with the sum of all workers' gradients; they all ask for it."""
        started = self._send_gradients(Request.STEP, rate, clip_norm is not None)
        if clip_norm is not None:
            squares = sum(self._answers(started))
            factor = min(1.0, clip_norm / (math.sqrt(squares) + CLIP_EPSILON))
            started = [[link.start_numbers(factor)] for link in self._links]
        for link, works, weights in zip(self._links, started, self._weights, strict=True):
            works.append(link.start_receive(weights, "parameters"))
        self._wait(started)

    def push(self, rate: float) -> int:
        """Update with this worker's gradient; how many updates came since it pulled."""
        is_only = len(self._links) == 1
        first, *_ = self._answers(self._send_gradients(Request.PUSH, rate, is_only))
        if not is_only:
            self.done()
        return int(first)

    def done(self) -> None:
        """What was claimed is done, with or without an update."""
        self._links[0].send_numbers(Request.DONE)

    def pull(self) -> None:
        """The newest weights."""
        self._pull_from(0)

    def _pull_from(self, first: int) -> None:
        links, parts = self._links[first:], self._weights[first:]
        started = [
            [link.start_numbers(Request.PULL), link.start_receive(weights, "parameters")]
            for link, weights in zip(links, parts, strict=True)
        ]
        for link, works in zip(links, started, strict=True):
            link.wait(works)

    def next_assignment(self, terms: AssignmentRequest) -> QueuedAssignment:
        """The next turn, and the newest weights for it."""
        dealer = self._links[0]
        asked = (terms.first, terms.total, terms.checkpoint_every, terms.stop, terms.finish)
        dealer.send_numbers(Request.CLAIM, *asked)
        call, iteration, part, ahead, waited_seconds, *_ = dealer.receive_numbers()
        dealer.receive(self._weights[0], "parameters")
        self._pull_from(1)
        turn = Assignment(int(iteration), int(part), ACTIONS[int(call)])
        return QueuedAssignment(turn, int(ahead), waited_seconds)

    def barrier(self) -> None:
        """Wait for all workers, however long that takes: they may wait for a slow server."""
        self._links[0].send_numbers(Request.BARRIER)
        self._links[0].receive_numbers()

    def finished(self) -> None:
        for link in self._links:
            link.send_numbers(Request.FINISHED)

    def save(self) -> State:
        """The state of one optimizer of all weights: flat tensors, counts."""
        parts: list[State] = []
        for link, weights in zip(self._links, self._weights, strict=True):
            link.send_numbers(Request.SAVE)
            state: State = {}
            for name, value in link.receive_json().items():
                state[name] = value
                if value == TENSOR:
                    state[name] = tensor = torch.empty_like(weights, device="cpu")
                    link.receive(tensor, "parameters")
            parts.append(state)
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}

    def load(self, state: State) -> None:
        """Take a state back; one worker does so."""
        for number, link in enumerate(self._links):
            link.send_numbers(Request.LOAD)
            link.send_json(described(state))
            for value in state.values():
                if isinstance(value, Tensor):
                    link.send(chunk(value, len(self._links), number), "parameters")
            link.receive_numbers()

    def _send_gradients(self, *request: float) -> list[list[Work]]:
        return [
            [link.start_numbers(*request), link.start_send(gradient, "gradients")]
            for link, gradient in zip(self._links, self._gradients, strict=True)
        ]

    def _answers(self, started: Sequence[list[Work]]) -> list[float]:
        """The first number that each server answers to what was started."""
        answers = torch.empty(len(self._links), NUMBERS, dtype=torch.float64)
        for link, works, answer in zip(self._links, started, answers, strict=True):
            works.append(link.start_receive(answer, "control"))
        self._wait(started)
        return [float(answer[0]) for answer in answers]

    def _wait(self, started: Sequence[Sequence[Work]]) -> None:
        for link, works in zip(self._links, started, strict=True):
            link.wait(works)


def _joined(values: Sequence[Tensor | float | None]) -> Tensor | float | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.cat(tensors) if tensors else values[0]
