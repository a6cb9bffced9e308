"""What one server holds: a contiguous part of the flat weights, and the optimizer of that part.

SGD and Adam treat every element by itself, so the parts together do what one optimizer of all
weights does.

A synchronous update on a server: all workers bring a gradient, the sum is applied once.

One server: a thread for each worker answers its requests until all of them have left."""

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
"""Of an optimizer, for one flat tensor: one like the weights, a count, or nothing yet."""

TENSOR = "tensor"
"""Stands for a tensor where a state is described."""


class Shard:
    def __init__(self, weights: Tensor, make_optimizer: MakeOptimizer) -> None:
        self._parameter = nn.Parameter(weights)
        self._optimizer = make_optimizer(self._parameter)
        self.updates = 0

    @property
    def weights(self) -> Tensor:
        return self._parameter.detach()

    def apply(self, gradient: Tensor, rate: float) -> None:
        """One update; the gradient may be used up."""
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


def described(state: State) -> dict[str, float | str | None]:
    """As JSON can hold it; the tensors follow it in the same order."""
    return {name: TENSOR if isinstance(value, Tensor) else value for name, value in state.items()}


class SyncRound:
    """Serves all workers, each from a thread of its own. A worker that has not been answered brings
    nothing new, so there is one round at a time."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = Condition()
        self._brought: dict[int, Tensor] = {}
        self._total: Tensor | None = None
        self._squares = 0.0
        self._summed = 0
        self._applied = 0
        self._gave_up = False

    def add(self, worker: int, gradient: Tensor) -> tuple[int, float]:
        """Returns when all have come: the round's number, and the sum of squares of the total."""
        with self._changed:
            number = self._summed + 1
            self._brought[worker] = gradient
            if len(self._brought) == self._workers:
                self._sum()
            while self._summed < number:
                if self._gave_up:
                    raise PeerError("a worker is gone")
                self._changed.wait()
            return number, self._squares

    def _sum(self) -> None:
        # In the order of the ranks, whoever came first: the same bits in every run.
        first, *others = (self._brought[worker] for worker in range(self._workers))
        for other in others:
            first.add_(other)
        self._total = first
        self._squares = float(first.double().square().sum())
        self._brought.clear()
        self._summed += 1
        self._changed.notify_all()

    def apply(self, number: int, update: Callable[[Tensor], None]) -> None:
        """Update with the total of a round, unless another thread has done so."""
        with self._changed:
            if self._applied < number and self._total is not None:
                update(self._total)
                self._applied = number

    def abort(self) -> None:
        """Let nobody wait any longer: somebody who would have to come is gone."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()


class WorkerBarrier:
    """Completes once all workers have arrived, each on its own thread.

    Unlike `threading.Barrier`, a barrier that has completed stays so: `abort` fails only those that
    still wait for somebody, not a thread that has yet to wake up.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._changed = Condition()
        self._arrived = 0
        self._completed = 0
        self._is_aborted = False

    def wait(self) -> None:
        """Raises `PeerError` if somebody who would have to come is gone."""
        with self._changed:
            number = self._completed + 1
            self._arrived += 1
            if self._arrived == self._workers and not self._is_aborted:
                self._arrived = 0
                self._completed = number
                self._changed.notify_all()
            while self._completed < number:
                if self._is_aborted:
                    raise PeerError("a worker is gone")
                self._changed.wait()

    def abort(self) -> None:
        """Fail those who wait now, and those who still come."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class Server:
    def __init__(
        self,
        links: Sequence[ServerConnection],
        make_optimizer: MakeOptimizer,
        staleness: int | None,
    ) -> None:
        """`links` are those to the workers, by rank."""
        self._links = links
        self._make_optimizer = make_optimizer
        self._dealer = AssignmentQueue(len(links), staleness)
        self._rounds = SyncRound(len(links))
        self._barrier = WorkerBarrier(len(links))
        self._lock = Lock()
        """Held while the shard changes or is copied."""
        self._shard: Shard | None = None
        self._read_at = [0] * len(links)
        """The shard's number of updates at each worker's last pull."""
        self._finished = [False] * len(links)
        self._failure: Exception | None = None
        self._handlers: dict[Request, Callable[[int, ServerConnection, list[float]], None]] = {
            Request.BEGIN: self._begin,
            Request.STEP: self._step,
            Request.PUSH: self._push,
            Request.PULL: self._pull,
            Request.CLAIM: self._claim,
            Request.DONE: lambda worker, _, __: self._dealer.done(worker),
            Request.SAVE: self._save,
            Request.LOAD: self._load,
            Request.BARRIER: self._wait_for_all,
            Request.FINISHED: self._finish,
        }

    def serve(self) -> None:
        """Return when all workers have left; one that leaves too early sends the others home."""
        threads = [
            Thread(target=self._attend, args=(worker,), name=f"paceline-worker-{worker}")
            for worker in range(len(self._links))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _attend(self, worker: int) -> None:
        link = self._links[worker]
        try:
            while True:
                numbers = link.receive_numbers()
                self._handlers[Request(int(numbers[0]))](worker, link, numbers[1:])
        except PeerError:
            pass
        except Exception as error:  # noqa: BLE001 - raised again by `serve`
            self._failure = self._failure or error
        link.close()
        if not self._finished[worker]:
            self._break_up()
        else:
            # Whoever leaves on its own has passed its last barrier; any other would wait forever.
            self._barrier.abort()

    def _break_up(self) -> None:
        self._finished = [True] * len(self._links)
        self._dealer.abort()
        self._rounds.abort()
        self._barrier.abort()
        for link in self._links:
            link.close()

    def _begin(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        weights = torch.empty(int(numbers[0]), dtype=DTYPES[int(numbers[1])])
        link.receive(weights, "parameters")
        if self._shard is None:
            self._shard = Shard(weights, self._make_optimizer)
            self._buffers = [torch.empty_like(weights) for _ in self._links]
        else:
            self._shard.weights.copy_(weights)
        link.send_numbers()

    @property
    def _held(self) -> Shard:
        if self._shard is None:
            raise RuntimeError("a worker asked for weights before any were given")
        return self._shard

    def _step(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        rate, clips = numbers[0], bool(numbers[1])
        shard, gradient = self._held, self._buffers[worker]
        link.receive(gradient, "gradients")
        number, squares = self._rounds.add(worker, gradient)
        if clips:
            # All workers see the same sums, and send the same factor back: the first one counts.
            link.send_numbers(squares)
            factor = link.receive_numbers()[0]
            self._rounds.apply(number, lambda total: shard.apply(total.mul_(factor), rate))
        else:
            self._rounds.apply(number, lambda total: shard.apply(total, rate))
        link.send(shard.weights, "parameters")

    def _push(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        gradient = self._buffers[worker]
        link.receive(gradient, "gradients")
        with self._lock:
            behind = self._held.updates - self._read_at[worker]
            self._held.apply(gradient, numbers[0])
        if numbers[1]:
            self._dealer.done(worker)
        link.send_numbers(behind)

    def _pull(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        copy = self._buffers[worker]
        with self._lock:
            copy.copy_(self._held.weights)
            self._read_at[worker] = self._held.updates
        link.send(copy, "parameters")

    def _claim(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        first, total, checkpoint_every, stop, finish = map(int, numbers[:5])
        terms = AssignmentRequest(first, total, checkpoint_every, bool(stop), bool(finish))
        deal = self._dealer.next_assignment(worker, terms)
        turn = deal.turn
        action = ACTIONS.index(turn.action)
        link.send_numbers(action, turn.iteration, turn.part, deal.ahead, deal.waited_seconds)
        self._pull(worker, link, numbers)

    def _save(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        with self._lock:
            state = self._held.state()
        link.send_json(described(state))
        for value in state.values():
            if isinstance(value, Tensor):
                link.send(value, "parameters")

    def _load(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        state: State = {}
        for name, value in link.receive_json().items():
            state[name] = value
            if value == TENSOR:
                state[name] = tensor = torch.empty_like(self._held.weights)
                link.receive(tensor, "parameters")
        with self._lock:
            self._held.load_state(state)
        link.send_numbers()

    def _wait_for_all(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        self._barrier.wait()
        link.send_numbers()

    def _finish(self, worker: int, link: ServerConnection, numbers: list[float]) -> None:
        self._finished[worker] = True
