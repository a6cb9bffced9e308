"""Gradient averaging in buckets that overlap the backward pass.

The backward pass computes gradients in roughly the reverse order of the layers. They are laid out
in that order and split into buckets. A bucket is reduced as soon as its last gradient is ready: by
the library, which has its own threads, or, with a codec or an algorithm of comm/algorithms, by a
background thread. After the backward pass, training waits only for the last buckets.

The first bucket is small, so that communication starts early. Across nodes, the other buckets are
also small, because the network is the bottleneck and must not be idle. Within a node, the same
cores compute and communicate, so a few large buckets are faster.
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
from paceline.measure.timeline import BusyTimer, busy_seconds, timeline_of
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy

MIB = 2**20
ACROSS_NODES_MIB, WITHIN_NODE_MIB = 4.0, 25.0


@dataclass(slots=True)
class Bucket:
    """Gradients that are reduced together."""

    key: str
    gradient: Tensor
    shapes: Sequence[tuple[int, ...]]
    weights: frozenset[int]
    """Indices of the weights that the gradients belong to."""
    missing: set[int] = field(default_factory=set)
    """Weights whose gradients are not ready yet in this step."""


class Overlap(GradientAveraging):
    """All-reduces buckets of gradients during the backward pass."""

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
        """`bucket_mib` defaults to 4 across nodes and 25 within a node."""
        check_option("bucket_mib", bucket_mib or 0, minimum=0, maximum=10**6)
        check_option("first_bucket_mib", first_bucket_mib, minimum=0, maximum=10**6)
        super().__init__(algorithm=algorithm, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._bucket_mib, self._first_bucket_mib = bucket_mib, first_bucket_mib
        self._is_size_fixed = bucket_mib is not None

    def setup(self, replica: Replica) -> None:
        # Not GradientAveraging.setup: buckets need another layout of the gradients.
        Strategy.setup(self, replica)
        if self._bucket_mib is None:
            self._bucket_mib = ACROSS_NODES_MIB if spans_nodes(replica) else WITHIN_NODE_MIB
        self._communicator = replica.communicator.dup() if self.reducer.is_library else None
        self._background = None if self._communicator else CommunicationThread(replica.communicator)
        self._timer = BusyTimer(timeline_of(replica.trainable[0].device))
        self._observed: list[int] | None = []
        """Weights in the order in which their gradients are ready; None after the first step."""
        self._lay_out(list(reversed(range(len(replica.trainable)))))
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._hook(index))
            for index, weight in enumerate(replica.trainable)
        ]

    def _lay_out(self, order: Sequence[int]) -> None:
        """Allocate the gradients in the given order of weights and split them into buckets."""
        self._order = order
        weights = [self.replica.trainable[index] for index in order]
        gradients = FlatBuffer(weights)
        gradients.hold_gradients()
        shapes = [tuple(weight.shape) for weight in weights]
        self.replica.flat_gradients = gradients.tensor
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        assert self._bucket_mib is not None
        for begin, end in bucket_bounds(
            weights, self._first_bucket_mib * MIB, self._bucket_mib * MIB
        ):
            key, members = str(len(self._buckets)), frozenset(order[begin:end])
            bucket = Bucket(key, gradients.range(begin, end), shapes[begin:end], members)
            self._buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(members, bucket))
        self._begin_step()

    def _begin_step(self) -> None:
        self._started: list[Work] = []
        for bucket in self._buckets:
            bucket.missing = set(bucket.weights)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        """Return the hook that torch calls when the gradient of a weight is ready."""

        def on_gradient(_weight: Tensor) -> None:
            if self.replica.is_last_microbatch:
                self._on_gradient(index)

        return on_gradient

    def _on_gradient(self, index: int) -> None:
        if self._observed is not None:
            self._observed.append(index)
        bucket = self._bucket_of[index]
        if index not in bucket.missing:
            # The bucket's all-reduce may have started without the second gradient.
            raise RunError(
                "--strategy overlap: a weight received a second gradient in one step, from another"
                " backward pass or from reentrant checkpointing of a layer that is used twice:"
                " use --strategy allreduce"
            )
        bucket.missing.remove(index)
        if bucket.missing:
            return
        # All ranks must start the buckets in the same order, for any order of the gradients.
        while (started := len(self._started)) < len(self._buckets) and not self._buckets[
            started
        ].missing:
            self._start(self._buckets[started])

    def _start(self, bucket: Bucket) -> None:
        interval = self._timer.begin()

        def reduce(communicator: Communicator) -> None:
            self.reducer.reduce(communicator, bucket.key, bucket.gradient, bucket.shapes)

        def end(moment: float) -> None:
            interval.ended = moment

        if self._background:
            work = self._background.submit(reduce, bucket.gradient.device)
        else:
            assert self._communicator is not None
            work = self._communicator.all_reduce(bucket.gradient, self.reducer.kind)
        work.add_done_callback(end)
        self._started.append(work)

    def step(self) -> None:
        with self.replica.exposed_communication():
            # Buckets that contain unused weights have not started yet.
            for bucket in self._buckets[len(self._started) :]:
                self._start(bucket)
            for work in self._started:
                work.wait()
        spans = self._timer.spans(self._timer.take())
        self.replica.add_overlapped(busy_seconds(spans, until=self.replica.exposed.began[-1]))
        self.replica.update()
        self._adopt_order()
        self._begin_step()

    def _adopt_order(self) -> None:
        """After the first step, use the order of rank 0's gradients on all ranks. Collective."""
        if self._observed is not None:
            weights = range(len(self.replica.trainable))
            unused = (index for index in weights if index not in self._observed)
            order = broadcast_json(self.replica.communicator, [*self._observed, *unused])
            self._observed = None
            # A codec keeps state per bucket, so its buckets must not change.
            if not self.reducer.codec:
                self._lay_out(order)

    def finish(self) -> None:
        for hook in self._hooks:
            hook.remove()
        # Closing a connection causes errors on peers that are still receiving.
        self.replica.communicator.barrier().wait()
        if self._background:
            self._background.close()
        if self._communicator:
            self._communicator.close()

    def state_dict(self) -> dict[str, Any]:
        # The order of summation depends on an element's position in its bucket.
        return {
            **super().state_dict(),
            "order": list(self._order),
            "bucket_mib": self._bucket_mib,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # Checkpoints of other strategies have no order; the first step determines it.
        if "order" in state:
            self._observed = None
            if not self._is_size_fixed:
                # The run may resume on other nodes. Older checkpoints do not contain the size.
                self._bucket_mib = state.get("bucket_mib", WITHIN_NODE_MIB)
            self._lay_out(state["order"])


def spans_nodes(replica: Replica) -> bool:
    """Return whether the workers are on more than one node. Collective."""
    nodes = gather_json(replica.communicator, replica.node)
    return bool(broadcast_json(replica.communicator, nodes and len(set(nodes)) > 1))


def bucket_bounds(
    weights: Sequence[nn.Parameter], first_bytes: float, other_bytes: float
) -> list[tuple[int, int]]:
    """Return the begin and end index of each bucket's weights; a bucket ends when it is full."""
    bounds: list[tuple[int, int]] = []
    begin = size = 0
    for index, weight in enumerate(weights):
        size += weight.nbytes
        if size >= (other_bytes if bounds else first_bytes):
            bounds.append((begin, index + 1))
            begin, size = index + 1, 0
    if begin < len(weights):
        bounds.append((begin, len(weights)))
    return bounds
