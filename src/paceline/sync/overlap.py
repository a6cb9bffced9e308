"""Averaging gradients in buckets while the backward pass still computes the others.

The backward pass makes gradients in about the reverse order of the layers. They are laid out in
that order, cut into buckets, and a bucket travels as soon as its last gradient is there, on a
thread of its own. What is left to wait for after the backward pass is only the last buckets. The first bucket
is small, so that communication starts early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor, nn

from paceline.comm.background import Background
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.comm.work import Work
from paceline.sync.averaging import GradientAveraging
from paceline.sync.flat import FlatGradients
from paceline.sync.replica import Replica
from paceline.sync.state_exchange import broadcast_model


@dataclass(slots=True)
class Bucket:
    """Some gradients that travel together."""

    key: str
    gradient: Tensor
    shapes: Sequence[tuple[int, ...]]
    missing: int = 0
    """Gradients of this step that are not there yet."""
    work: Work | None = None


class Overlap(GradientAveraging):
    def __init__(
        self,
        *,
        algorithm: str = "library",
        bucket_mib: float = 25.0,
        first_bucket_mib: float = 1.0,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        super().__init__(algorithm=algorithm, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._limits = (first_bucket_mib * 2**20, bucket_mib * 2**20)

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        broadcast_model(replica.model, replica.communicator)
        self._background = Background(replica.communicator)
        self._busy_seconds = 0.0
        self._seen: list[int] | None = []
        """Weights in the order in which their gradients came, in the first step."""
        self._lay_out(list(reversed(range(len(replica.trainable)))))
        for number, weight in enumerate(replica.trainable):
            weight.register_post_accumulate_grad_hook(self._hook(number))

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay the gradients out in this order of the weights, and cut it into buckets."""
        weights = [self.replica.trainable[number] for number in order]
        gradients = FlatGradients(weights)
        self.replica.flat_gradients = gradients.tensor
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        for begin, end in cut(weights, *self._limits):
            part = gradients.part(begin, end)
            bucket = Bucket(str(len(self._buckets)), part, gradients.shapes[begin:end])
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(order[begin:end], bucket))
        self._begin_step()

    def _begin_step(self) -> None:
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing, bucket.work = len(bucket.shapes), None

    def _hook(self, number: int) -> _Hook:
        return _Hook(self, number)

    def gradient_is_there(self, number: int) -> None:
        """Called during the backward pass, once for each weight."""
        if not self.replica.last_part:
            return
        if self._seen is not None:
            self._seen.append(number)
        self._bucket_of[number].missing -= 1
        # In the buckets' order on every worker, whatever order the gradients came in here.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._sent]
        self._sent += 1

        def exchange(communicator: Communicator) -> None:
            began = perf_counter()
            self.exchange.sum(communicator, bucket.key, bucket.gradient, bucket.shapes)
            self._busy_seconds += perf_counter() - began

        bucket.work = self._background.submit(exchange)

    def step(self) -> None:
        busy_before = self._busy_seconds
        with self.replica.exchanging():
            # A weight that took no part in this loss has no gradient to wait for.
            while self._sent < len(self._buckets):
                self._send_next()
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
        exposed = self.replica.exposed.ended[-1] - self.replica.exposed.began[-1]
        busy = self._busy_seconds - busy_before
        self.replica.hidden_exchange_seconds += max(0.0, busy - exposed)
        self.replica.update()
        self._agree_on_order()
        self._begin_step()

    def _agree_on_order(self) -> None:
        """After the first step the buckets follow the order that rank 0 has seen. Collective."""
        if self._seen is not None:
            weights = range(len(self.replica.trainable))
            own = [*self._seen, *(number for number in weights if number not in self._seen)]
            order = broadcast_json(self.replica.communicator, own)
            self._seen = None
            if not self.exchange.codec:
                self._lay_out(order)

    def finish(self) -> None:
        self._background.close()


class _Hook:
    """Bound to a strategy and a weight's number; torch calls it with the weight."""

    def __init__(self, strategy: Overlap, number: int) -> None:
        self._strategy, self._number = strategy, number

    def __call__(self, weight: Tensor) -> None:
        self._strategy.gradient_is_there(self._number)


def cut(
    weights: Sequence[nn.Parameter], first_bytes: float, other_bytes: float
) -> list[tuple[int, int]]:
    """Where buckets begin and end: each closes with the weight that makes it full."""
    bounds, begin, size = [], 0, 0
    for number, weight in enumerate(weights):
        size += weight.nbytes
        if size >= (other_bytes if bounds else first_bytes):
            bounds.append((begin, number + 1))
            begin, size = number + 1, 0
    if begin < len(weights):
        bounds.append((begin, len(weights)))
    return bounds
