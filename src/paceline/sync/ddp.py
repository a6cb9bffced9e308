"""PyTorch's own DistributedDataParallel, measured like the others.

DDP overlaps buckets with the backward pass as overlap.py does, in C++. A communication hook stands
in for its all-reduce: it sums where DDP would average, since losses are weighted already, and notes
when a bucket was handed over and when its sum was there.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.background import Background
from paceline.comm.communicator import Communicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.errors import ConfigError
from paceline.sync.averaging import GradientAveraging
from paceline.sync.exchange import KIND
from paceline.sync.replica import Replica


class Ddp(GradientAveraging):
    """With a codec, buckets travel through it on a thread of their own."""

    def __init__(
        self,
        *,
        bucket_mib: float = 25.0,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        super().__init__(flat=True, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._bucket_mib = bucket_mib

    def attach(self, replica: Replica) -> None:
        self.replica = replica
        self._communicator = replica.communicator
        self._background: Background | None = None
        if self._communicator.world_size == 1:
            return
        if not isinstance(self._communicator, TorchCommunicator):
            raise ConfigError(["--strategy ddp: needs workers that torch.distributed connects"])
        self._group: Any = self._communicator.process_group()
        if self.exchange.codec:
            self._background = Background(self._communicator)
        self._began: float | None = None
        self._handed_over = self._ended = 0.0
        module = replica.forward if isinstance(replica.forward, nn.Module) else replica.model
        self._wrapped = DistributedDataParallel(
            module,
            process_group=self._group,
            bucket_cap_mb=self._bucket_mib,
            broadcast_buffers=False,
        )
        # DDP compares annotations with classes, so a function that has none stands between.
        self._wrapped.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
        replica.forward = self._forward

    def _forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            outputs = self.replica.model(inputs)
        else:
            # DDP asks in the forward pass whether the backward pass is to communicate.
            self._wrapped.require_backward_grad_sync = self.replica.last_part
            outputs = self._wrapped(inputs)
        assert isinstance(outputs, Tensor)
        return outputs

    def _hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Called by DDP when a bucket is full; the future gives the sum."""
        self._handed_over = perf_counter()
        if self._began is None:
            self._began = self._handed_over
        if self._background is not None:
            return self._through_codec(bucket, self._background)
        gradient = bucket.buffer()
        traffic, algorithm = self._communicator.traffic, self.exchange.algorithm
        rank, world = self._communicator.rank, self._communicator.world_size
        size = (world, gradient.numel(), gradient.element_size())
        traffic.begin(
            KIND,
            bytes_sent=algorithm.bytes_sent(rank, *size),
            bytes_received=algorithm.bytes_received(rank, *size),
            messages=2 * (world - 1),
        )

        def arrived(future: Future[list[Tensor]]) -> Tensor:
            traffic.end(KIND)
            self._ended = perf_counter()
            return future.value()[0]

        summing: Future[list[Tensor]] = self._group.allreduce([gradient]).get_future()
        summed: Future[Tensor] = summing.then(arrived)
        return summed

    def _through_codec(self, bucket: GradBucket, background: Background) -> Future[Tensor]:
        gradient, key = bucket.buffer(), str(bucket.index())
        shapes = [tuple(part.shape) for part in bucket.gradients()]
        future: Future[Tensor] = Future()

        def exchange(communicator: Communicator) -> None:
            try:
                self.exchange.sum(communicator, key, gradient, shapes)
                self._ended = perf_counter()
                future.set_result(gradient)
            except Exception as error:
                future.set_exception(error)
                raise

        background.submit(exchange)
        return future

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self._communicator.world_size == 1 or not self.replica.last_part:
            return
        # DDP waits for its sums inside the backward pass: what came after the last gradient was
        # ready is communication that nothing hid.
        now = self.replica.clock.enter("other")
        ready = self._handed_over
        self.replica.clock.move("backward", "exchange", now - ready)
        self.replica.exposed.note(ready, now)
        if self._began is not None:
            busy = max(0.0, self._ended - self._began)
            self.replica.hidden_exchange_seconds += max(0.0, busy - (now - ready))
        self._began = None

    def step(self) -> None:
        self.replica.update()

    def finish(self) -> None:
        if self._background is not None:
            self._background.close()
