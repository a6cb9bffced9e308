"""A worker's requests to all servers, each of which holds a shard of the flat weights.

A step has one request and one reply per server. All requests of a synchronous step are sent before
the first reply is received; an asynchronous one comes to server 0 after all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.buffers import chunk, chunk_begin
from paceline.comm.connection import EMPTY, Connection, bytes_of
from paceline.strategies.parameter_server.memory import WorkerMemory
from paceline.strategies.parameter_server.protocol import (
    DTYPES,
    Request,
    State,
    clip_factor,
    pack_state,
    unpack_state,
)
from paceline.strategies.strategy import ACTIONS, Assignment, AssignmentRequest


class _Server:
    """A worker's connection to one server, and its shard of the worker's memory."""

    def __init__(
        self, connection: Connection, memory: WorkerMemory, is_shared: bool, decayed: int
    ) -> None:
        self.connection, self.weights = connection, memory.weights
        self.decayed = decayed
        """Elements of the shard that have weight decay; the rest has none."""
        self._shared_bytes = memory.weights.nbytes if is_shared else 0
        self._gradient_payload = [] if is_shared else [bytes_of(memory.gradients)]
        self._weights_payload = EMPTY if is_shared else bytes_of(memory.weights)

    def request(self, request: Request, *numbers: float) -> None:
        self.connection.send(request, *numbers)

    def send_gradient(self, request: Request, *numbers: float) -> None:
        self.connection.send(
            request,
            *numbers,
            payload=self._gradient_payload,
            kind="gradients",
            shared_bytes=self._shared_bytes,
        )

    def receive_numbers(self) -> tuple[float, ...]:
        return self.connection.receive().numbers

    def receive_weights(self) -> tuple[float, ...]:
        """Receive new weights; returns the numbers of the reply."""
        return self.connection.receive(
            self._weights_payload, "parameters", self._shared_bytes
        ).numbers


class ServerClient:
    """Sends requests to all servers at the same time; server 0 also assigns work."""

    def __init__(
        self, connections: Sequence[Connection], elements: int, dtype: torch.dtype, decayed: int
    ) -> None:
        """`elements` and `dtype` are those of the flat weights; the first `decayed` have decay."""
        self._decayed = decayed
        is_shared = any(connection.is_same_node for connection in connections)
        with WorkerMemory.allocate(elements, dtype, is_shared) as (self.memory, name):
            self._servers = [
                self._attach(connection, name, elements, len(connections), index)
                for index, connection in enumerate(connections)
            ]
        self._first, *self._others = self._servers

    def _attach(
        self, connection: Connection, name: str, elements: int, servers: int, index: int
    ) -> _Server:
        begin, end = (chunk_begin(elements, servers, each) for each in (index, index + 1))
        dtype = DTYPES.index(self.memory.weights.dtype)
        payload = memoryview(name.encode() if connection.is_same_node else b"")
        connection.send(Request.ATTACH, elements, begin, end, dtype, payload=[payload])
        is_shared = bool(connection.receive().numbers[0])
        decayed = min(max(self._decayed - begin, 0), end - begin)
        return _Server(connection, self.memory.shard(begin, end), is_shared, decayed)

    def bind(self, weights: Tensor, gradients: Tensor) -> None:
        """Use these flat tensors of the model: those of `memory`, or others, such as on a GPU."""
        self._weights, self._gradients = weights, gradients
        self._is_staged = weights.data_ptr() != self.memory.weights.data_ptr()

    def _stage_gradients(self) -> None:
        if self._is_staged:
            self.memory.gradients.copy_(self._gradients)

    def _load_weights(self) -> None:
        if self._is_staged:
            self._weights.copy_(self.memory.weights)

    def begin(self) -> None:
        """Send the initial weights. Called by one worker, before any request for weights."""
        if self._is_staged:
            self.memory.weights.copy_(self._weights)
        for server in self._servers:
            payload = [bytes_of(server.weights)]
            server.connection.send(
                Request.BEGIN, server.decayed, payload=payload, kind="parameters"
            )
        self._receive_acknowledgments()

    def step(self, rate: float, clip_norm: float | None, is_measured: bool = False) -> float:
        """Update the weights with the sum of all workers' gradients. Collective.

        Returns the squared norm of the sum, before it is clipped; 0 unless `is_measured`.
        """
        self._stage_gradients()
        if clip_norm is None or not self._others:
            for server in self._servers:
                server.send_gradient(Request.STEP, rate, clip_norm or 0.0, is_measured)
            squares = sum(server.receive_weights()[0] for server in self._servers)
        else:
            # The norm is that of the gradients on all servers.
            for server in self._servers:
                server.send_gradient(Request.SUM)
            squares = sum(server.receive_numbers()[0] for server in self._servers)
            for server in self._servers:
                server.request(Request.APPLY, rate, clip_factor(squares, clip_norm))
            for server in self._servers:
                server.receive_weights()
        self._load_weights()
        return squares

    def push(self, rate: float | None) -> int:
        """Update the weights with this worker's gradient; None means that it has none.

        Returns the number of updates by others since its last pull.
        """
        if rate is None:
            self._first.request(Request.DONE)
            return 0
        self._stage_gradients()
        self._push_to_others(Request.PUSH, rate)
        self._first.send_gradient(Request.PUSH, rate)
        return int(self._first.receive_numbers()[0])

    def pull(self) -> None:
        """Receive the current weights."""
        self._pull_from(self._servers)
        self._load_weights()

    def push_and_assign(
        self, rate: float | None, request: AssignmentRequest, is_bounded: bool
    ) -> tuple[int, Assignment]:
        """Push, then receive the next assignment and the current weights.

        `rate` and the first result are those of `push`.
        """
        numbers = (
            request.first,
            request.total,
            request.checkpoint_every,
            request.stop,
            request.finish,
        )
        # Server 0 comes last: to it, the update counts as applied by all servers.
        if rate is None:
            self._first.request(Request.ASSIGN, *numbers)
        else:
            self._stage_gradients()
            self._push_to_others(Request.PUSH if is_bounded else Request.PUSH_PULL, rate)
            self._first.send_gradient(Request.PUSH_ASSIGN, *numbers, rate)
        behind, action, iteration, part, ahead, waited = self._first.receive_weights()
        assignment = Assignment(int(iteration), int(part), ACTIONS[int(action)], int(ahead), waited)
        if rate is None or is_bounded or assignment.action != "train":
            # The assignment may imply updates that are newer than a pull before it.
            self._pull_from(self._others)
        self._load_weights()
        return int(behind), assignment

    def _push_to_others(self, request: Request, rate: float) -> None:
        for server in self._others:
            server.send_gradient(request, rate)
        for server in self._others:
            if request == Request.PUSH_PULL:
                server.receive_weights()
            else:
                server.receive_numbers()

    def _pull_from(self, servers: Sequence[_Server]) -> None:
        for server in servers:
            server.request(Request.PULL)
        for server in servers:
            server.receive_weights()

    def barrier(self) -> None:
        """Wait for all workers, without a timeout, because they may wait for a slow server."""
        self._first.request(Request.BARRIER)
        self._first.receive_numbers()

    def finish(self) -> None:
        """Announce that this worker will disconnect."""
        for server in self._servers:
            server.request(Request.FINISHED)

    def save(self) -> State:
        """Receive the optimizer state of all weights, as flat tensors and scalars."""
        shards = []
        for server in self._servers:
            server.request(Request.SAVE)
            message, payload = server.connection.receive_any("parameters")
            shards.append(unpack_state(payload, int(message.numbers[0]), server.weights))
        return {name: _join([shard[name] for shard in shards]) for name in shards[0]}

    def load(self, state: State) -> None:
        """Send an optimizer state of all weights. Called by one worker."""
        count = len(self._servers)
        for index, server in enumerate(self._servers):
            shard = {
                name: chunk(value, count, index) if isinstance(value, Tensor) else value
                for name, value in state.items()
            }
            description_bytes, payload = pack_state(shard)
            server.connection.send(
                Request.LOAD, description_bytes, payload=payload, kind="parameters"
            )
        self._receive_acknowledgments()

    def _receive_acknowledgments(self) -> None:
        for server in self._servers:
            server.receive_numbers()


def _join(values: Sequence[Tensor | float | None]) -> Tensor | float | None:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return torch.cat(tensors) if tensors else values[0]
