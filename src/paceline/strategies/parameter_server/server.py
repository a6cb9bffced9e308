"""A parameter server: holds a shard of the flat weights and the optimizer of that shard.

SGD and Adam are elementwise, so updating all shards equals an update by a single optimizer.
One thread per worker handles its requests until all workers have disconnected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition, Lock, Thread

import torch
from torch import Tensor, nn

from paceline.errors import PeerError
from paceline.strategies.parameter_server.assignments import AssignmentQueue
from paceline.strategies.parameter_server.protocol import DTYPES, Request, ServerConnection
from paceline.strategies.strategy import ACTIONS, AssignmentRequest, MakeOptimizer

State = dict[str, Tensor | float | None]
"""Optimizer state of one flat tensor: tensors of its shape, scalars, or None."""

TENSOR = "tensor"
"""Placeholder for a tensor in the description of a state."""


class WeightShard:
    """The weights of one server and their optimizer."""

    def __init__(self, weights: Tensor, make_optimizer: MakeOptimizer) -> None:
        self._parameter = nn.Parameter(weights)
        self._optimizer = make_optimizer(self._parameter)
        self.updates = 0

    @property
    def weights(self) -> Tensor:
        return self._parameter.detach()

    def apply(self, gradient: Tensor, rate: float) -> None:
        """Update the weights once; may overwrite the gradient."""
        self._parameter.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.updates += 1

    def state(self) -> State:
        values = self._optimizer.state.get(self._parameter, {})
        return {
            name: float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
            for name, value in values.items()
        }

    def load_state(self, state: State) -> None:
        values = {
            name: torch.tensor(value) if isinstance(value, float) else value
            for name, value in state.items()
        }
        settings = self._optimizer.state_dict()["param_groups"]
        own = {0: values} if values else {}
        self._optimizer.load_state_dict({"state": own, "param_groups": settings})


def describe(state: State) -> dict[str, float | str | None]:
    """Describe a state as JSON; its tensors are sent separately, in the same order."""
    return {name: TENSOR if isinstance(value, Tensor) else value for name, value in state.items()}


class SyncRound:
    """Sums the gradients of all workers, each on its own thread, and applies the sum once.

    A worker sends its next gradient only after the reply, so there is one round at a time.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = Condition()
        self._gradients: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._squares = 0.0
        self._summed = 0
        self._applied = 0
        self._is_aborted = False

    def add(self, worker: int, gradient: Tensor) -> tuple[int, float]:
        """Add a gradient and wait for all workers.

        Returns the number of the round and the sum of squares of the total gradient.
        """
        with self._changed:
            number = self._summed + 1
            self._gradients[worker] = gradient
            if len(self._gradients) == self._workers:
                self._sum()
            while self._summed < number:
                if self._is_aborted:
                    raise PeerError("a worker is lost")
                self._changed.wait()
            return number, self._squares

    def _sum(self) -> None:
        # Sum in rank order, so that results are deterministic.
        first, *others = (self._gradients[worker] for worker in range(self._workers))
        for other in others:
            first.add_(other)
        self._total = first
        self._squares = float(first.double().square().sum())
        self._gradients.clear()
        self._summed += 1
        self._changed.notify_all()

    def apply(self, number: int, update: Callable[[Tensor], None]) -> None:
        """Call `update` with the total gradient of a round, unless another thread has done so."""
        with self._changed:
            if self._applied < number and self._total is not None:
                update(self._total)
                self._applied = number

    def abort(self) -> None:
        """Fail all waiting workers, because one of them is lost."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class WorkerBarrier:
    """Completes once all workers have arrived, each on its own thread.

    Unlike in `threading.Barrier`, `abort` does not affect threads of a completed barrier that have
    not woken up yet.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = Condition()
        self._arrived = 0
        self._completed = 0
        self._is_aborted = False

    def wait(self) -> None:
        """Wait for all workers; raises PeerError if one of them is lost."""
        with self._changed:
            number = self._completed + 1
            self._arrived += 1
            if self._arrived == self._workers and not self._is_aborted:
                self._arrived = 0
                self._completed = number
                self._changed.notify_all()
            while self._completed < number:
                if self._is_aborted:
                    raise PeerError("a worker is lost")
                self._changed.wait()

    def abort(self) -> None:
        """Make all current and later calls of `wait` raise PeerError."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class Server:
    """Handles the requests of all workers for one shard of the weights."""

    def __init__(
        self,
        connections: Sequence[ServerConnection],
        make_optimizer: MakeOptimizer,
        staleness: int | None,
    ) -> None:
        """`connections` holds one connection per worker, by rank."""
        self._connections = connections
        self._make_optimizer = make_optimizer
        self._queue = AssignmentQueue(len(connections), staleness)
        self._rounds = SyncRound(len(connections))
        self._barrier = WorkerBarrier(len(connections))
        self._lock = Lock()
        """Held while the shard changes or is copied."""
        self._shard: WeightShard | None = None
        self._read_at = [0] * len(connections)
        """The shard's number of updates at each worker's last pull."""
        self._finished = [False] * len(connections)
        self._failure: Exception | None = None
        self._handlers: dict[Request, Callable[[int, ServerConnection, list[float]], None]] = {
            Request.BEGIN: self._begin,
            Request.STEP: self._step,
            Request.PUSH: self._push,
            Request.PULL: self._pull,
            Request.ASSIGN: self._assign,
            Request.DONE: lambda worker, _, __: self._queue.done(worker),
            Request.SAVE: self._save,
            Request.LOAD: self._load,
            Request.BARRIER: self._wait_for_all,
            Request.FINISHED: self._finish,
        }

    def serve(self) -> None:
        """Serve until all workers have disconnected.

        If a worker disconnects before it has finished, the connections to all others are closed.
        """
        threads = [
            Thread(target=self._handle_requests, args=(worker,), name=f"paceline-worker-{worker}")
            for worker in range(len(self._connections))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _handle_requests(self, worker: int) -> None:
        connection = self._connections[worker]
        try:
            while True:
                numbers = connection.receive_numbers()
                self._handlers[Request(int(numbers[0]))](worker, connection, numbers[1:])
        except PeerError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by `serve`
            self._failure = self._failure or error
        connection.close()
        if not self._finished[worker]:
            self._disconnect_all()
        else:
            # A finished worker has passed its last barrier; others must not wait for it.
            self._barrier.abort()

    def _disconnect_all(self) -> None:
        self._finished = [True] * len(self._connections)
        self._queue.abort()
        self._rounds.abort()
        self._barrier.abort()
        for connection in self._connections:
            connection.close()

    def _begin(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        weights = torch.empty(int(numbers[0]), dtype=DTYPES[int(numbers[1])])
        connection.receive(weights, "parameters")
        if self._shard is None:
            self._shard = WeightShard(weights, self._make_optimizer)
            self._buffers = [torch.empty_like(weights) for _ in self._connections]
        else:
            self._shard.weights.copy_(weights)
        connection.send_numbers()

    @property
    def _loaded_shard(self) -> WeightShard:
        if self._shard is None:
            raise RuntimeError("a worker requested weights before any were sent")
        return self._shard

    def _step(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        rate, is_clipped = numbers[0], bool(numbers[1])
        shard, gradient = self._loaded_shard, self._buffers[worker]
        connection.receive(gradient, "gradients")
        number, squares = self._rounds.add(worker, gradient)
        if is_clipped:
            # All workers compute the same factor from the same sums; the first reply counts.
            connection.send_numbers(squares)
            factor = connection.receive_numbers()[0]
            self._rounds.apply(number, lambda total: shard.apply(total.mul_(factor), rate))
        else:
            self._rounds.apply(number, lambda total: shard.apply(total, rate))
        connection.send(shard.weights, "parameters")

    def _push(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        gradient = self._buffers[worker]
        connection.receive(gradient, "gradients")
        with self._lock:
            behind = self._loaded_shard.updates - self._read_at[worker]
            self._loaded_shard.apply(gradient, numbers[0])
        if numbers[1]:
            self._queue.done(worker)
        connection.send_numbers(behind)

    def _pull(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        copy = self._buffers[worker]
        with self._lock:
            copy.copy_(self._loaded_shard.weights)
            self._read_at[worker] = self._loaded_shard.updates
        connection.send(copy, "parameters")

    def _assign(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        first, total, checkpoint_every, stop, finish = map(int, numbers[:5])
        request = AssignmentRequest(first, total, checkpoint_every, bool(stop), bool(finish))
        assignment = self._queue.next_assignment(worker, request)
        connection.send_numbers(
            ACTIONS.index(assignment.action),
            assignment.iteration,
            assignment.part,
            assignment.ahead,
            assignment.waited_seconds,
        )
        self._pull(worker, connection, numbers)

    def _save(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        with self._lock:
            state = self._loaded_shard.state()
        connection.send_json(describe(state))
        for value in state.values():
            if isinstance(value, Tensor):
                connection.send(value, "parameters")

    def _load(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        state: State = {}
        for name, value in connection.receive_json().items():
            state[name] = value
            if value == TENSOR:
                state[name] = tensor = torch.empty_like(self._loaded_shard.weights)
                connection.receive(tensor, "parameters")
        with self._lock:
            self._loaded_shard.load_state(state)
        connection.send_numbers()

    def _wait_for_all(
        self, worker: int, connection: ServerConnection, numbers: list[float]
    ) -> None:
        self._barrier.wait()
        connection.send_numbers()

    def _finish(self, worker: int, connection: ServerConnection, numbers: list[float]) -> None:
        self._finished[worker] = True
