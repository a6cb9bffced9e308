"""One server: a thread for each worker answers its requests until all of them have left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier, BrokenBarrierError, Lock, Thread

import torch
from torch import Tensor

from paceline.errors import PeerError
from paceline.sync.server.dealer import Dealer
from paceline.sync.server.link import DTYPES, Link, Request
from paceline.sync.server.round import Rounds
from paceline.sync.server.shard import TENSOR, Shard, State, described
from paceline.sync.strategy import CALLS, MakeOptimizer, Terms


class Server:
    def __init__(
        self, links: Sequence[Link], make_optimizer: MakeOptimizer, staleness: int | None
    ) -> None:
        """`links` are those to the workers, by rank."""
        self._links = links
        self._make_optimizer = make_optimizer
        self._dealer = Dealer(len(links), staleness)
        self._rounds = Rounds(len(links))
        self._barrier = Barrier(len(links))
        self._lock = Lock()
        """Held while the shard changes or is copied."""
        self._shard: Shard | None = None
        self._read_at = [0] * len(links)
        """The shard's number of updates at each worker's last pull."""
        self._finished = [False] * len(links)
        self._failure: Exception | None = None
        self._handlers: dict[Request, Callable[[int, Link, list[float]], None]] = {
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

    def _break_up(self) -> None:
        self._finished = [True] * len(self._links)
        self._dealer.give_up()
        self._rounds.give_up()
        self._barrier.abort()
        for link in self._links:
            link.close()

    def _begin(self, worker: int, link: Link, numbers: list[float]) -> None:
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

    def _step(self, worker: int, link: Link, numbers: list[float]) -> None:
        rate, clips = numbers[0], bool(numbers[1])
        shard, gradient = self._held, self._buffers[worker]
        link.receive(gradient, "gradients")
        number, squares = self._rounds.bring(worker, gradient)
        if clips:
            # All workers see the same sums, and send the same factor back: the first one counts.
            link.send_numbers(squares)
            factor = link.receive_numbers()[0]
            self._rounds.apply(number, lambda total: shard.apply(total.mul_(factor), rate))
        else:
            self._rounds.apply(number, lambda total: shard.apply(total, rate))
        link.send(shard.weights, "parameters")

    def _push(self, worker: int, link: Link, numbers: list[float]) -> None:
        gradient = self._buffers[worker]
        link.receive(gradient, "gradients")
        with self._lock:
            behind = self._held.updates - self._read_at[worker]
            self._held.apply(gradient, numbers[0])
        if numbers[1]:
            self._dealer.done(worker)
        link.send_numbers(behind)

    def _pull(self, worker: int, link: Link, numbers: list[float]) -> None:
        copy = self._buffers[worker]
        with self._lock:
            copy.copy_(self._held.weights)
            self._read_at[worker] = self._held.updates
        link.send(copy, "parameters")

    def _claim(self, worker: int, link: Link, numbers: list[float]) -> None:
        first, total, meet_every, stop, finish = map(int, numbers[:5])
        terms = Terms(first, total, meet_every, bool(stop), bool(finish))
        deal = self._dealer.claim(worker, terms)
        turn = deal.turn
        call = CALLS.index(turn.call)
        link.send_numbers(call, turn.iteration, turn.part, deal.ahead, deal.waited_seconds)
        self._pull(worker, link, numbers)

    def _save(self, worker: int, link: Link, numbers: list[float]) -> None:
        with self._lock:
            state = self._held.state()
        link.send_json(described(state))
        for value in state.values():
            if isinstance(value, Tensor):
                link.send(value, "parameters")

    def _load(self, worker: int, link: Link, numbers: list[float]) -> None:
        state: State = {}
        for name, value in link.receive_json().items():
            state[name] = value
            if value == TENSOR:
                state[name] = tensor = torch.empty_like(self._held.weights)
                link.receive(tensor, "parameters")
        with self._lock:
            self._held.load_state(state)
        link.send_numbers()

    def _wait_for_all(self, worker: int, link: Link, numbers: list[float]) -> None:
        try:
            self._barrier.wait()
        except BrokenBarrierError:
            raise PeerError("a worker is gone") from None
        link.send_numbers()

    def _finish(self, worker: int, link: Link, numbers: list[float]) -> None:
        self._finished[worker] = True
