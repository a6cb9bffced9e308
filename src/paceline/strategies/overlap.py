"""Gradient averaging in buckets that overlap the backward pass.

The backward pass computes gradients in roughly the reverse order of the layers. A bucket of them
(buckets.py) is reduced as soon as its last gradient is ready: by the library, which has its own
threads, or, with a codec or an algorithm of comm/algorithms, by a background thread. After the
backward pass, training waits only for the last buckets.

The bucket size is tuned in the first steps (bucket_tuning.py) if that does not affect results. The
sum of two values does not depend on the layout, but with more workers, the position of an element
in its bucket decides in which order a ring adds, and timing would decide how sums are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, Literal

from torch import Tensor

from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator
from paceline.comm.objects import broadcast_json
from paceline.comm.work import Work
from paceline.config.conversion import check_option
from paceline.errors import RunError
from paceline.measure.timeline import Moment, Timeline, timeline_of
from paceline.strategies.bucket_layout import DEFAULT_MIB, FIRST_MIB, split, split_in_order
from paceline.strategies.bucket_tuning import SIZES_MIB, BucketTuner, Choice, StepTimes
from paceline.strategies.buckets import Bucket, own_gradient
from paceline.strategies.exchange_meter import ExchangeMeter
from paceline.strategies.flat_buffer import check_same_kind
from paceline.strategies.gradient_averaging import GradientAveraging
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy


class BucketMeter(ExchangeMeter):
    """Also records the bucket layout and how it was chosen."""

    def __init__(self, replica: Replica, timeline: Timeline, choice: Choice) -> None:
        super().__init__(replica, timeline)
        self.choice = choice
        self.bucket_bytes: list[int] = []

    def summary(self) -> dict[str, Any]:
        return {
            "buckets": {
                "count": len(self.bucket_bytes),
                "bytes": self.bucket_bytes,
                **asdict(self.choice),
            }
        }


class Overlap(GradientAveraging):
    """All-reduces buckets of gradients during the backward pass."""

    reports_own_gradients = True

    def __init__(
        self,
        *,
        algorithm: str = "library",
        bucket_mib: float | Literal["auto", "measured"] | None = "auto",
        first_bucket_mib: float = FIRST_MIB,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        """`auto` tunes the bucket size if results do not depend on it, `measured` always."""
        if isinstance(bucket_mib, float | int):
            check_option("bucket_mib", bucket_mib, minimum=0, maximum=10**6)
        check_option("first_bucket_mib", first_bucket_mib, minimum=0, maximum=10**6)
        super().__init__(algorithm=algorithm, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._requested = "auto" if bucket_mib is None else bucket_mib
        self._first_bucket_mib = first_bucket_mib

    def setup(self, replica: Replica) -> None:
        # Not GradientAveraging.setup: buckets need another layout of the gradients.
        Strategy.setup(self, replica)
        check_same_kind(replica.trainable)
        self._communicator = replica.communicator.dup() if self.reducer.is_library else None
        self._background = None if self._communicator else CommunicationThread(replica.communicator)
        self._timeline = timeline_of(replica.trainable[0].device)
        self._observed: list[int] | None = []
        """Weights in the order in which their gradients are ready; None after the first step."""
        self._order: Sequence[int] = [*reversed(range(len(replica.trainable)))]
        self._tuner, choice = self._plan()
        self.meter = self._meter = BucketMeter(replica, self._timeline, choice)
        self._ready: dict[int, Moment] | None = None
        """When each gradient was ready; None unless the step is measured."""
        self._copy_seconds = 0.0
        self._use(choice)
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._hook(index))
            for index, weight in enumerate(replica.trainable)
        ]

    def is_warm(self) -> bool:
        # Until then, each step may have another layout of the buckets.
        return super().is_warm() and self._observed is None and self._tuner is None

    def replay_observers(self) -> list[Any]:
        communicator = self._communicator or self.replica.communicator
        return [*communicator.replay_observers(), self._meter]

    def _plan(self) -> tuple[BucketTuner | None, Choice]:
        """Return how to choose the bucket size, and the size to start with."""
        if not isinstance(self._requested, str):
            return None, Choice(self._requested, "set by -o bucket_mib")
        workers = self.replica.communicator.world_size
        if workers == 1:
            return None, Choice(DEFAULT_MIB, "a single worker does not communicate")
        if self.reducer.codec is not None:
            return None, Choice(DEFAULT_MIB, "a codec keeps state per bucket")
        if workers > 2 and self._requested == "auto":
            reason = "with more than two workers, rounding depends on the size"
            return None, Choice(DEFAULT_MIB, reason)
        sizes = [weight.nbytes for weight in self.replica.trainable]
        if len(split(sizes, self._order, self._first_bucket_mib, min(SIZES_MIB))) == 1:
            return None, Choice(DEFAULT_MIB, "the gradients fit in one bucket")
        return BucketTuner(), Choice(DEFAULT_MIB, "not measured yet")

    def _use(self, choice: Choice) -> None:
        """Use the chosen bucket size from the next step on."""
        self._meter.choice = choice
        self._resize(choice.bucket_mib)

    def _resize(self, bucket_mib: float) -> None:
        self._bucket_mib = bucket_mib
        sizes = [weight.nbytes for weight in self.replica.trainable]
        self._lay_out(split(sizes, self._order, self._first_bucket_mib, bucket_mib))

    def _lay_out(self, layout: Sequence[Sequence[int]]) -> None:
        weights = self.replica.trainable
        self._buckets = [
            Bucket(str(number), weights, members) for number, members in enumerate(layout)
        ]
        self._meter.bucket_bytes = [bucket.bytes for bucket in self._buckets]
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.members}
        self._started: list[Work] = []

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        """Return the hook that torch calls when the gradient of a weight is ready."""

        def on_gradient(_weight: Tensor) -> None:
            if self.replica.is_last_microbatch:
                self._on_gradient(index)
            else:
                # Autograd adds the gradient of the next microbatch in place.
                own_gradient(self.replica.trainable[index])

        return on_gradient

    def _on_gradient(self, index: int) -> None:
        if self._observed is not None:
            self._observed.append(index)
        if self._ready is not None:
            self._ready[index] = self._timeline.mark()
        bucket = self._bucket_of[index]
        if index not in bucket.missing:
            # The bucket's all-reduce may have started without the second gradient.
            raise RunError(
                "--strategy overlap: a weight received a second gradient in one step, from another"
                " backward pass or from reentrant checkpointing of a layer that is used twice:"
                " use --strategy allreduce"
            )
        added = perf_counter()
        bucket.add(index)
        self._copy_seconds += perf_counter() - added
        if bucket.missing:
            return
        # All ranks must start the buckets in the same order, for any order of the gradients.
        while (started := len(self._started)) < len(self._buckets) and not self._buckets[
            started
        ].missing:
            self._start(self._buckets[started])

    def _start(self, bucket: Bucket) -> None:
        gradient = bucket.gradient()
        if self.replica.noise.wants_own:
            self.replica.noise.add_own([gradient])
        interval = self._meter.begin()

        def reduce(communicator: Communicator) -> None:
            self.reducer.reduce(communicator, bucket.key, gradient, bucket.shapes)

        def end(moment: Moment) -> None:
            interval.ended = moment

        if self._background:
            work = self._background.submit(reduce, gradient.device)
        else:
            assert self._communicator is not None
            work = self._communicator.all_reduce(gradient, self.reducer.kind)
        self._started.append(work)
        # The last one ends while training waits for it, which needs no callback on another thread.
        if len(self._started) < len(self._buckets):
            work.add_done_callback(end)

    def backward(self, loss: Tensor) -> None:
        if self._tuner is not None and self._observed is None and self.replica.is_last_microbatch:
            self._ready, self._copy_seconds, self._began = {}, 0.0, self._timeline.mark()
        super().backward(loss)

    def step(self) -> None:
        backward_ended = self._timeline.mark()
        with self.replica.exposed_communication():
            # Buckets that contain unused weights have not started yet.
            for bucket in self._buckets[len(self._started) :]:
                bucket.add_missing()
                self._start(bucket)
            for work in self._started:
                work.wait()
            self._meter.end_last(self._timeline.mark())
        transfers = self._meter.end_step(backward_ended)
        self.replica.update()
        self._empty_buckets()
        if self._observed is not None:
            self._adopt_order(self._observed)
        elif self._tuner is not None and self._ready is not None:
            spans = [transfer.span() for transfer in transfers]
            self._tune(self._tuner, self._ready, backward_ended, spans)

    def discard_step(self) -> None:
        super().discard_step()
        self._empty_buckets()

    def _empty_buckets(self) -> None:
        self._started = []
        for bucket in self._buckets:
            bucket.missing.update(bucket.members)

    def _adopt_order(self, observed: Sequence[int]) -> None:
        """After the first step, use the order of rank 0's gradients on all ranks. Collective."""
        self._observed = None
        # A codec keeps state per bucket, so its buckets must not change.
        if not self.reducer.codec:
            unused = (index for index in sorted(self._order) if index not in observed)
            self._order = broadcast_json(self.replica.communicator, [*observed, *unused])
            self._resize(self._tuner.bucket_mib if self._tuner else self._bucket_mib)

    def _tune(
        self,
        tuner: BucketTuner,
        ready: dict[int, Moment],
        backward_ended: Moment,
        spans: Sequence[tuple[float, float]],
    ) -> None:
        """Record a measured step; after the last one, choose the bucket size. Collective."""
        began, ended = map(self._timeline.seconds, (self._began, backward_ended))
        tuner.add(
            StepTimes(
                backward=ended - began,
                copies=self._copy_seconds,
                ready=[
                    self._timeline.seconds(ready.get(index, backward_ended)) - began
                    for index in self._order
                ],
                exchanges=[
                    (bucket.bytes, begin - began, end - began)
                    for bucket, (begin, end) in zip(self._buckets, spans, strict=True)
                ],
            )
        )
        self._ready = None
        if tuner.is_complete:
            self._tuner = None
            weights = [self.replica.trainable[index] for index in self._order]
            self._use(tuner.choose(self.replica.communicator, weights, self._first_bucket_mib))
        else:
            self._resize(tuner.bucket_mib)

    def synchronize(self) -> None:
        super().synchronize()
        if self._communicator:
            self._communicator.synchronize()

    def finish(self) -> None:
        self._meter.settle()
        for hook in self._hooks:
            hook.remove()
        # Closing a connection causes errors on peers that are still receiving.
        self.replica.communicator.barrier().wait()
        if self._background:
            self._background.close()
        if self._communicator:
            self._communicator.close()

    @property
    def _depends_on_buckets(self) -> bool:
        """Whether results depend on the layout: by the order of summation or the codec's state."""
        return self.replica.communicator.world_size > 2 or self.reducer.codec is not None

    def state_dict(self) -> dict[str, Any]:
        keeps_buckets = self._depends_on_buckets and self._tuner is None
        return {
            **super().state_dict(),
            "order": [*self._order],
            "bucket_mib": self._bucket_mib if keeps_buckets else None,
            "buckets": [[*each.members] for each in self._buckets] if keeps_buckets else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        # Checkpoints of other strategies have no order; the first step determines it.
        if "order" not in state:
            return
        self._order, self._observed = state["order"], None
        # Older checkpoints contain only the size, or not even that.
        bucket_mib = state.get("bucket_mib", 25.0)
        is_other_size = not isinstance(self._requested, str) and self._requested != bucket_mib
        if bucket_mib is None or is_other_size or not self._depends_on_buckets:
            self._resize(self._tuner.bucket_mib if self._tuner else self._bucket_mib)
            return
        self._tuner, self._bucket_mib = None, bucket_mib
        self._meter.choice = Choice(bucket_mib, "as before the run was resumed")
        sizes = [weight.nbytes for weight in self.replica.trainable]
        self._lay_out(
            state.get("buckets")
            or split_in_order(sizes, self._order, self._first_bucket_mib, bucket_mib)
        )
