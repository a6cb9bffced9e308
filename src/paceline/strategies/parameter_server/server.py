"""A parameter server: holds a shard of the flat weights and the optimizer of that shard.

SGD and Adam are elementwise, so updating all shards equals an update by a single optimizer.
One thread handles the requests of all workers in the order of their arrival until all workers have
disconnected. A request that waits for other workers is answered when the last one arrives.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.buffers import memcpy
from paceline.comm.connection import Connection, Message, NonBlockingConnection, bytes_of
from paceline.errors import PeerError
from paceline.strategies.optimizer_step import FusedSgdStep
from paceline.strategies.parameter_server.assignments import AssignmentQueue
from paceline.strategies.parameter_server.memory import WorkerMemory
from paceline.strategies.parameter_server.protocol import (
    DTYPES,
    Request,
    State,
    clip_factor,
    pack_state,
    unpack_state,
)
from paceline.strategies.strategy import ACTIONS, AssignmentRequest, MakeOptimizer

READ, READ_WRITE = selectors.EVENT_READ, selectors.EVENT_READ | selectors.EVENT_WRITE


class WeightShard:
    """The weights of one server and their optimizer."""

    def __init__(self, weights: Tensor, decayed: int, make_optimizer: MakeOptimizer) -> None:
        """The first `decayed` elements have weight decay, the others none."""
        self.weights = weights
        sizes = [size for size in (decayed, len(weights) - decayed) if size] or [0]
        self._sizes = sizes
        self._parameters = [nn.Parameter(part) for part in weights.split(sizes)]
        self._optimizer = make_optimizer(self._parameters[0])
        for rest in self._parameters[1:]:
            self._optimizer.add_param_group({"params": [rest]})
        if decayed < len(weights):
            self._optimizer.param_groups[-1]["weight_decay"] = 0.0
        self._step = FusedSgdStep(self._optimizer)
        self.payload = bytes_of(self.weights)
        self.updates = 0

    def apply(self, gradient: Tensor, rate: float) -> None:
        """Update the weights once; may overwrite the gradient."""
        for parameter, part in zip(self._parameters, gradient.split(self._sizes), strict=True):
            parameter.grad = part
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._step()
        self.updates += 1

    def state(self) -> State:
        """Return the state of all elements; tensors of both parts are joined."""
        parts = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        return {name: _join([part[name] for part in parts]) for name in parts[0]}

    def load_state(self, state: State) -> None:
        parts: dict[int, dict[str, Tensor | None]] = {}
        for name, value in state.items():
            if isinstance(value, Tensor):
                values: Sequence[Tensor | None] = value.split(self._sizes)
            else:
                scalar = None if value is None else torch.tensor(value)
                values = [None if scalar is None else scalar.clone() for _ in self._sizes]
            for index, part in enumerate(values):
                parts.setdefault(index, {})[name] = part
        settings = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": parts, "param_groups": settings})


class Worker:
    """A server's connection to one worker, and its shard of the worker's memory."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self.rank = rank
        self.connection = NonBlockingConnection(connection)
        self.is_connected = True
        self.is_finished = False
        """Whether the worker has announced that it will disconnect."""
        self.is_watched = False
        """Whether the server waits until the worker accepts more data."""
        self.pulled_at = 0
        """The shard's number of updates at the worker's last pull."""
        self.behind = 0
        """Updates between pull and push, for the reply with the next assignment."""
        self._payload = bytearray()
        """The payload of the last request, unless it was a gradient."""

    def attach(self, name: str, elements: int, begin: int, end: int, dtype: torch.dtype) -> bool:
        """Map the worker's memory, or allocate buffers; returns whether memory is shared."""
        shared = WorkerMemory.attach(name, elements, dtype) if name else None
        self.is_shared = shared is not None
        memory = shared.shard(begin, end) if shared else WorkerMemory.private(end - begin, dtype)
        self.gradient, self.weights = memory.gradients, memory.weights
        self._gradient_target = bytes_of(self.gradient)
        self.weights_payload = bytes_of(self.weights)
        return self.is_shared

    def receive(self) -> Message | None:
        """Receive what has arrived; return the request once it is complete."""
        return self.connection.receive(self._target_of)

    def _target_of(self, message: Message) -> memoryview:
        if message.code in WITH_GRADIENT:
            return self._gradient_target
        self._payload = bytearray(message.payload_bytes)
        return memoryview(self._payload)

    def take_payload(self) -> bytearray:
        """Return the payload of the last request, which was not a gradient."""
        payload, self._payload = self._payload, bytearray()
        return payload


WITH_GRADIENT = frozenset(
    {Request.STEP, Request.SUM, Request.PUSH, Request.PUSH_PULL, Request.PUSH_ASSIGN}
)
"""Requests whose payload is a gradient."""


class Server:
    """Handles the requests of all workers for one shard of the weights."""

    def __init__(
        self,
        connections: Sequence[Connection],
        make_optimizer: MakeOptimizer,
        staleness: int | None,
    ) -> None:
        """`connections` holds one connection per worker, by rank."""
        self._workers = [Worker(rank, each) for rank, each in enumerate(connections)]
        self._make_optimizer = make_optimizer
        self._queue = AssignmentQueue(len(connections), staleness)
        self._shard: WeightShard | None = None
        self._arrived: dict[Request, list[Worker]] = {
            Request.STEP: [], Request.SUM: [], Request.BARRIER: []
        }  # fmt: skip
        """Workers that wait for the others, by their request."""
        self._unapplied: Tensor | None = None
        """The total gradient between SUM and APPLY."""
        self._is_barrier_broken = False
        """Whether a worker has disconnected, so that no barrier can complete."""
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Callable[[Worker, tuple[float, ...]], None]] = {
            Request.ATTACH: self._attach,
            Request.BEGIN: self._begin,
            Request.STEP: self._step,
            Request.SUM: self._sum,
            Request.APPLY: self._apply,
            Request.PUSH: self._push,
            Request.PULL: self._pull,
            Request.PUSH_PULL: self._push_pull,
            Request.ASSIGN: self._assign,
            Request.PUSH_ASSIGN: self._push_assign,
            Request.DONE: self._done,
            Request.SAVE: self._save,
            Request.LOAD: self._load,
            Request.BARRIER: self._wait_for_all,
            Request.FINISHED: self._finish,
        }

    def serve(self) -> None:
        """Serve until all workers have disconnected.

        If a worker disconnects before it has finished, the connections to all others are closed.
        """
        with self._selector as selector:
            for worker in self._workers:
                selector.register(worker.connection.socket, READ, worker)
            try:
                while selector.get_map():
                    for key, events in selector.select():
                        self._serve_worker(key.data, events)
            finally:
                for worker in self._workers:
                    worker.connection.close()

    def _serve_worker(self, worker: Worker, events: int) -> None:
        if not worker.is_connected:
            return  # An earlier event of the same selection closed the connection.
        try:
            if events & selectors.EVENT_WRITE:
                worker.connection.flush()
                self._watch(worker)
            if events & selectors.EVENT_READ:
                message = worker.receive()
                if message is not None:
                    self._handlers[message.code](worker, message.numbers)
        except PeerError:
            self._disconnect(worker)

    def _disconnect(self, worker: Worker) -> None:
        lost = [worker]
        while lost:
            each = lost.pop()
            if not each.is_connected:
                continue
            each.is_connected = False
            self._selector.unregister(each.connection.socket)
            each.connection.close()
            # A finished worker has passed its last barrier; others must not wait for it.
            self._is_barrier_broken = True
            lost += self._arrived[Request.BARRIER] if each.is_finished else self._workers

    def _reply(self, worker: Worker, *numbers: float, payload: Sequence[memoryview] = ()) -> None:
        try:
            worker.connection.send(*numbers, payload=payload)
            self._watch(worker)
        except PeerError:
            self._disconnect(worker)

    def _reply_weights(self, worker: Worker, *numbers: float, is_stable: bool = False) -> None:
        """Reply with the weights; `is_stable` if they cannot change before the worker has them."""
        shard = self._loaded_shard
        worker.pulled_at = shard.updates
        if worker.is_shared:
            memcpy(worker.weights, shard.weights)
            self._reply(worker, *numbers)
        elif is_stable:
            self._reply(worker, *numbers, payload=[shard.payload])
        else:
            memcpy(worker.weights, shard.weights)
            self._reply(worker, *numbers, payload=[worker.weights_payload])

    def _watch(self, worker: Worker) -> None:
        """Wait until a worker accepts more data only while there is data for it."""
        if worker.connection.has_unsent != worker.is_watched:
            worker.is_watched = not worker.is_watched
            events = READ_WRITE if worker.is_watched else READ
            self._selector.modify(worker.connection.socket, events, worker)

    def _have_all_arrived(self, request: Request, worker: Worker) -> bool:
        """Count a worker's request, and return whether it is the last one."""
        self._arrived[request].append(worker)
        if len(self._arrived[request]) < len(self._workers):
            return False
        self._arrived[request].clear()
        return True

    def _attach(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        elements, begin, end, dtype = map(int, numbers[:4])
        name = worker.take_payload().decode()
        self._reply(worker, worker.attach(name, elements, begin, end, DTYPES[dtype]))

    def _begin(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        weights = torch.empty_like(worker.weights)
        bytes_of(weights)[:] = worker.take_payload()
        if self._shard is None:
            self._shard = WeightShard(weights, int(numbers[0]), self._make_optimizer)
        else:
            self._shard.weights.copy_(weights)
        self._reply(worker)

    @property
    def _loaded_shard(self) -> WeightShard:
        if self._shard is None:
            raise RuntimeError("a worker requested weights before any were sent")
        return self._shard

    def _step(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        if self._have_all_arrived(Request.STEP, worker):
            rate, clip_norm, is_measured = numbers[:3]
            total = self._total_gradient()
            squares = _sum_of_squares(total) if clip_norm or is_measured else 0.0
            if clip_norm:
                total.mul_(clip_factor(squares, clip_norm))
            self._loaded_shard.apply(total, rate)
            for each in self._workers:
                self._reply_weights(each, squares, is_stable=True)

    def _sum(self, worker: Worker, _: tuple[float, ...]) -> None:
        if self._have_all_arrived(Request.SUM, worker):
            self._unapplied = self._total_gradient()
            squares = _sum_of_squares(self._unapplied)
            for each in self._workers:
                self._reply(each, squares)

    def _apply(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        if self._unapplied is not None:
            # All workers compute the same factor from the same sums; the first request counts.
            rate, factor = numbers[:2]
            self._loaded_shard.apply(self._unapplied.mul_(factor), rate)
            self._unapplied = None
        self._reply_weights(worker, is_stable=True)

    def _total_gradient(self) -> Tensor:
        # Sum in rank order, so that results are deterministic.
        first, *others = (worker.gradient for worker in self._workers)
        for other in others:
            first.add_(other)
        return first

    def _update(self, worker: Worker, rate: float) -> int:
        """Apply a worker's gradient; returns the number of updates since its last pull."""
        shard = self._loaded_shard
        behind = shard.updates - worker.pulled_at
        shard.apply(worker.gradient, rate)
        return behind

    def _push(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        behind = self._update(worker, numbers[0])
        self._reply(worker, behind)
        self._done(worker, numbers)

    def _pull(self, worker: Worker, _: tuple[float, ...]) -> None:
        self._reply_weights(worker)

    def _push_pull(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        self._reply_weights(worker, self._update(worker, numbers[0]))

    def _assign(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        first, total, checkpoint_every, stop, finish = map(int, numbers[:5])
        self._queue.request(
            worker.rank,
            AssignmentRequest(first, total, checkpoint_every, bool(stop), bool(finish)),
        )
        self._reply_assignments()

    def _push_assign(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        worker.behind = self._update(worker, numbers[5])
        self._assign(worker, numbers)

    def _done(self, worker: Worker, _: tuple[float, ...]) -> None:
        self._queue.done(worker.rank)
        self._reply_assignments()

    def _reply_assignments(self) -> None:
        for rank, assignment in self._queue.grant():
            worker = self._workers[rank]
            behind, worker.behind = worker.behind, 0
            self._reply_weights(
                worker,
                behind,
                ACTIONS.index(assignment.action),
                assignment.iteration,
                assignment.part,
                assignment.ahead,
                assignment.waited_seconds,
            )

    def _save(self, worker: Worker, _: tuple[float, ...]) -> None:
        description_bytes, payload = pack_state(self._loaded_shard.state())
        self._reply(worker, description_bytes, payload=payload)

    def _load(self, worker: Worker, numbers: tuple[float, ...]) -> None:
        shard = self._loaded_shard
        shard.load_state(unpack_state(worker.take_payload(), int(numbers[0]), shard.weights))
        self._reply(worker)

    def _wait_for_all(self, worker: Worker, _: tuple[float, ...]) -> None:
        if self._is_barrier_broken:
            self._disconnect(worker)
        elif self._have_all_arrived(Request.BARRIER, worker):
            for each in self._workers:
                self._reply(each)

    def _finish(self, worker: Worker, _: tuple[float, ...]) -> None:
        worker.is_finished = True


def _join(values: Sequence[Tensor | float | None]) -> Tensor | float | None:
    """Join one entry of the optimizer state of all parts of a shard."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim() == 0:
        return float(first)
    return torch.cat([value for value in values if isinstance(value, Tensor)])


def _sum_of_squares(gradient: Tensor) -> float:
    return float(gradient.double().square().sum())
