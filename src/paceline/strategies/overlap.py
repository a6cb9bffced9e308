"""Averaging gradients in buckets while the backward pass still computes the others.

The backward pass makes gradients in about the reverse order of the layers. They are laid out in
that order and cut into buckets, and a bucket travels as soon as its last gradient is there: handed
to the library, which has threads of its own, or, with a codec or an algorithm of comm/algorithms,
to a thread of ours. What is left to wait for after the backward pass is only the last buckets. The
first bucket is small, so that communication starts early. Between machines the others are small as
well: the link is what training waits for, and must not wait itself. Within a machine, where the
same cores compute and communicate, fewer interruptions are worth more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json, gather_json
from paceline.comm.work import Work
from paceline.config.conversion import check_option
from paceline.errors import RunError
from paceline.measure.timeline import timeline_of
from paceline.strategies.flat_buffer import FlatGradients
from paceline.strategies.gradient_averaging import GradientAveraging, Underway, seconds_under_way
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

MIB = 2**20
BETWEEN_MACHINES_MIB, WITHIN_MACHINE_MIB = 4.0, 25.0


@dataclass(slots=True)
class Bucket:
    """Some gradients that travel together."""

    key: str
    gradient: Tensor
    shapes: Sequence[tuple[int, ...]]
    weights: frozenset[int]
    """The numbers of the weights whose gradients these are."""
    missing: set[int] = field(default_factory=set)
    """Those whose gradient of this step is not there yet."""


class Overlap(GradientAveraging):
    def __init__(
        self,
        *,
        algorithm: str = "library",
        bucket_mib: float | None = None,
        first_bucket_mib: float = 1.0,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        """`bucket_mib`: None is 4 between machines and 25 within one."""
        check_option("bucket_mib", bucket_mib or 0, minimum=0, maximum=10**6)
        check_option("first_bucket_mib", first_bucket_mib, minimum=0, maximum=10**6)
        super().__init__(algorithm=algorithm, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._bucket_mib, self._first_bucket_mib = bucket_mib, first_bucket_mib
        self._is_given = bucket_mib is not None

    def setup(self, replica: Replica) -> None:
        # Not GradientAveraging.setup: buckets need another layout of the gradients.
        Strategy.setup(self, replica)
        if self._bucket_mib is None:
            self._bucket_mib = BETWEEN_MACHINES_MIB if is_spread(replica) else WITHIN_MACHINE_MIB
        self._line = replica.communicator.dup() if self.exchange.returns_at_once else None
        self._background = None if self._line else CommunicationThread(replica.communicator)
        self._underway = Underway(timeline_of(replica.trainable[0].device))
        self._seen: list[int] | None = []
        """Weights in the order in which their gradients came, in the first step."""
        self._lay_out(list(reversed(range(len(replica.trainable)))))
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._hook(number))
            for number, weight in enumerate(replica.trainable)
        ]

    def _lay_out(self, order: Sequence[int]) -> None:
        """Lay the gradients out in this order of the weights, and cut it into buckets."""
        self._order = order
        weights = [self.replica.trainable[number] for number in order]
        gradients = FlatGradients(weights)
        self.replica.flat_gradients = gradients.tensor
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        assert self._bucket_mib is not None
        for begin, end in cut(weights, self._first_bucket_mib * MIB, self._bucket_mib * MIB):
            part = gradients.part(begin, end)
            key, members = str(len(self._buckets)), frozenset(order[begin:end])
            bucket = Bucket(key, part, gradients.shapes[begin:end], members)
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))
        self._begin_step()

    def _begin_step(self) -> None:
        self._under_way: list[Work] = []
        for bucket in self._buckets:
            bucket.missing = set(bucket.weights)

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        """What torch calls with the weight of this number, once its gradient is there."""

        def gradient_is_there(_weight: Tensor) -> None:
            if self.replica.is_last_microbatch:
                self._note(number)

        return gradient_is_there

    def _note(self, number: int) -> None:
        if self._seen is not None:
            self._seen.append(number)
        bucket = self._bucket_of[number]
        if number not in bucket.missing:
            # It may be under way, and what is added to it now would be this worker's alone.
            raise RunError(
                "--strategy overlap: a weight got a second gradient before the update, by another"
                " backward pass or by reentrant checkpointing of a layer that is used twice:"
                " choose --strategy allreduce"
            )
        bucket.missing.remove(number)
        if bucket.missing:
            return
        # In the buckets' order on every worker, whatever order the gradients came in here.
        while (sent := len(self._under_way)) < len(self._buckets) and not self._buckets[
            sent
        ].missing:
            self._send(self._buckets[sent])

    def _send(self, bucket: Bucket) -> None:
        under_way = self._underway.begin()

        def exchange(communicator: Communicator) -> None:
            self.exchange.sum(communicator, bucket.key, bucket.gradient, bucket.shapes)

        def end(moment: float) -> None:
            under_way.ended = moment

        if self._background:
            work = self._background.submit(exchange, bucket.gradient.device)
        else:
            assert self._line is not None
            work = self.exchange.begin(self._line, bucket.key, bucket.gradient)
        work.add_done_callback(end)
        self._under_way.append(work)

    def step(self) -> None:
        with self.replica.exposed_communication():
            # A weight that took no part in this loss has no gradient to wait for.
            for bucket in self._buckets[len(self._under_way) :]:
                self._send(bucket)
            for work in self._under_way:
                work.wait()
        spans = self._underway.spans(self._underway.take())
        self.replica.note_hidden(seconds_under_way(spans, until=self.replica.exposed.began[-1]))
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
            # What a codec remembers of the buckets must go on fitting them.
            if not self.exchange.codec:
                self._lay_out(order)

    def finish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        # A line that closes cuts off those who still receive on it.
        self.replica.communicator.barrier().wait()
        if self._background:
            self._background.close()
        if self._line:
            self._line.close()

    def state_dict(self) -> dict[str, Any]:
        # The order of a sum depends on where in a bucket it is, so a resumed run needs the same.
        return {
            **super().state_dict(),
            "order": list(self._order),
            "bucket_mib": self._bucket_mib,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # Another strategy's checkpoint says nothing of an order: then the first step tells it.
        if "order" in state:
            self._seen = None
            if not self._is_given:
                # The machines may be others now. Checkpoints once had no word of it.
                self._bucket_mib = state.get("bucket_mib", WITHIN_MACHINE_MIB)
            self._lay_out(state["order"])


def is_spread(replica: Replica) -> bool:
    """Whether the workers are on several machines. Collective."""
    nodes = gather_json(replica.communicator, replica.node)
    return bool(broadcast_json(replica.communicator, nodes and len(set(nodes)) > 1))


def cut(
    weights: Sequence[nn.Parameter], first_bytes: float, other_bytes: float
) -> list[tuple[int, int]]:
    """Where buckets begin and end: each closes with the weight that makes it full."""
    bounds: list[tuple[int, int]] = []
    begin = size = 0
    for number, weight in enumerate(weights):
        size += weight.nbytes
        if size >= (other_bytes if bounds else first_bytes):
            bounds.append((begin, number + 1))
            begin, size = number + 1, 0
    if begin < len(weights):
        bounds.append((begin, len(weights)))
    return bounds
