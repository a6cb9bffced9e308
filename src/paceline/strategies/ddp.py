"""PyTorch's own DistributedDataParallel, measured like the others.

DDP overlaps buckets with the backward pass as overlap.py does, in C++. A communication hook stands
in for its all-reduce: it sums where DDP would average, since losses are weighted already, and notes
when a bucket was handed over and when its sum was there.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch lists it not
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator, format_ranks
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.errors import ConfigError, PeerError, RunError
from paceline.measure.timeline import Timeline, timeline_of
from paceline.measure.traffic import CountedTransfer
from paceline.strategies.gradient_averaging import (
    KIND,
    Exchange,
    GradientAveraging,
    Underway,
    seconds_under_way,
)
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import StepMeter, Strategy, check_uses_torch


@dataclass(frozen=True, slots=True)
class _Step:
    """What was exchanged in one step, in the order in which the gradients were ready."""

    exchanges: list[Exchange]
    transfers: list[CountedTransfer]


class ExchangeMeter(StepMeter):
    """Accounts for the exchanges of each step.

    DDP waits for its sums inside the backward pass: what came after the last gradient was ready is
    exposed communication. With NCCL that is known only when the GPU gets there, so a step is
    accounted for after the next one, so that the program can keep submitting work.
    """

    def __init__(self, replica: Replica, timeline: Timeline, *, is_nccl: bool) -> None:
        self.underway = Underway(timeline)
        self.transfers: list[CountedTransfer] = []
        """Of the step at hand."""
        self._replica = replica
        self._is_nccl = is_nccl
        self._unaccounted = _Step([], [])

    def end_step(self) -> None:
        """All exchanges of a step have been started, and without NCCL they have ended."""
        step = _Step(self.underway.take(), self.transfers)
        self.transfers = []
        if self._is_nccl:
            step, self._unaccounted = self._unaccounted, step
        self._account_for(step)

    def settle(self) -> None:
        """Account for every step that has ended; waits for the GPU."""
        step, self._unaccounted = self._unaccounted, _Step([], [])
        self._account_for(step)

    def _account_for(self, step: _Step) -> None:
        spans = self.underway.spans(step.exchanges)
        if not spans:
            return
        replica, clock = self._replica, self._replica.clock
        ready = spans[-1][0]
        ended = max(ready, *(span[1] for span in spans))
        clock.move("backward", "exchange", ended - ready)
        if clock.log is not None:
            clock.settle_log()
            clock.log.relabel("backward", "exchange", ready, ended)
        replica.exposed.note(ready, ended)
        replica.note_hidden(seconds_under_way(spans, until=ready))
        if self._is_nccl:
            replica.communicator.traffic.add_seconds(KIND, seconds_under_way(spans))
            for transfer, span in zip(step.transfers, spans, strict=False):
                if transfer.is_logged:
                    transfer.began, transfer.completed = span


class Ddp(GradientAveraging):
    """With a codec, buckets travel through it on a thread of their own."""

    def __init__(
        self,
        *,
        bucket_mib: float | None = None,
        find_unused: bool = False,
        codec: str = "none",
        chunk: str | None = None,
        ratio: str | None = None,
        rank: str | None = None,
    ) -> None:
        """`find_unused`: look in every pass for weights that have no part in the loss."""
        check_option("bucket_mib", bucket_mib or 0, minimum=0, maximum=10**6)
        super().__init__(flat=True, codec=codec, chunk=chunk, ratio=ratio, rank=rank)
        self._bucket_mib = bucket_mib
        self._find_unused = find_unused

    def check(self, config: RunConfig) -> list[str]:
        return check_uses_torch(config)

    def setup(self, replica: Replica) -> None:
        self._communicator = replica.communicator
        self._background: CommunicationThread | None = None
        is_single = self._communicator.world_size == 1
        if not is_single and not isinstance(self._communicator, TorchCommunicator):
            raise ConfigError(["--strategy ddp: needs workers that torch.distributed connects"])
        # Not GradientAveraging.setup: DDP allocates the gradients itself.
        Strategy.setup(self, replica)
        if is_single:
            return
        assert isinstance(self._communicator, TorchCommunicator)
        self._group: Any = self._communicator.default_process_group()
        if self.exchange.codec:
            self._background = CommunicationThread(self._communicator)
        self._timeline = timeline_of(replica.trainable[0].device)
        on_own_gpu = replica.trainable[0].device == self._communicator.gpu
        # The background thread's transfers are timed by its communicator.
        self._uses_nccl = on_own_gpu and self._background is None
        self._meter = ExchangeMeter(replica, self._timeline, is_nccl=self._uses_nccl)
        self.meter = self._meter
        self._failed = self._is_rehearsal = False
        # What a codec remembers of the buckets must fit them from the first step to the last.
        self._to_rehearse = self.exchange.codec is not None
        self._plain_forward = replica.forward
        module = replica.forward if isinstance(replica.forward, nn.Module) else replica.model
        self._wrapped = DistributedDataParallel(
            module,
            process_group=self._group,
            bucket_cap_mb=self._bucket_mib,
            init_sync=False,
            find_unused_parameters=self._find_unused,
        )
        # Buffers are agreed on when they are needed, for evaluation, and not at every step.
        self._wrapped.require_forward_param_sync = False
        # DDP compares annotations with classes, so a function that has none stands between.
        self._wrapped.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
        replica.forward = self._forward

    def _forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._plain_forward(inputs)
        if self._to_rehearse:
            self._rehearse(inputs)
        # DDP asks in the forward pass whether the backward pass is to communicate.
        self._wrapped.require_backward_grad_sync = self.replica.is_last_microbatch
        try:
            outputs = self._wrapped(inputs)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error):
                raise RunError(
                    "--strategy ddp: some weights had no part in the loss: give -o find_unused=true"
                ) from None
            raise self._explained(error) from None
        assert isinstance(outputs, Tensor)
        return outputs

    def _rehearse(self, inputs: Tensor) -> None:
        """A pass that leaves no trace but DDP's final buckets, which it makes after its first.

        A resumed run starts with them, since the order of a sum depends on the place in a bucket.
        """
        self._to_rehearse = False
        buffers = [(buffer, buffer.clone()) for buffer in self.replica.model.buffers()]
        self._wrapped.require_backward_grad_sync = self._is_rehearsal = True
        with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
            self._wrapped(inputs).sum().backward()
        self._is_rehearsal = False
        for buffer, before in buffers:
            buffer.copy_(before)
        self.replica.clear_gradients()

    def _hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Called by DDP when a bucket is full; the future gives the sum."""
        gradient = bucket.buffer()
        if self._is_rehearsal:
            nothing: Future[Tensor] = Future()
            nothing.set_result(gradient)
            return nothing
        under_way = self._meter.underway.begin()
        if self._background is not None:
            return self._through_codec(bucket, self._background, under_way)
        traffic, algorithm = self._communicator.traffic, self.exchange.algorithm
        rank, world = self._communicator.rank, self._communicator.world_size
        size = (world, gradient.numel(), gradient.element_size())
        transfer = traffic.begin(
            KIND,
            bytes_sent=algorithm.bytes_sent(rank, *size),
            bytes_received=algorithm.bytes_received(rank, *size),
            messages=2 * (world - 1),
        )
        self._meter.transfers.append(transfer)

        def arrived(future: Future[list[Tensor]]) -> Tensor:
            # NCCL's future calls this at once, with a current stream that continues at the end.
            under_way.ended = self._timeline.mark() if self._uses_nccl else perf_counter()
            traffic.end(transfer)
            try:
                return future.value()[0]
            except RuntimeError:
                self._failed = True
                raise

        summing: Future[list[Tensor]] = self._group.allreduce([gradient]).get_future()
        summed: Future[Tensor] = summing.then(arrived)
        return summed

    def _through_codec(
        self, bucket: GradBucket, background: CommunicationThread, under_way: Exchange
    ) -> Future[Tensor]:
        gradient, key = bucket.buffer(), str(bucket.index())
        shapes = [tuple(part.shape) for part in bucket.gradients()]
        future: Future[Tensor] = Future(devices=[gradient.device] if gradient.is_cuda else None)

        def exchange(communicator: Communicator) -> None:
            self.exchange.sum(communicator, key, gradient, shapes)

        def complete(moment: float) -> None:
            under_way.ended = moment
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - DDP raises it
                self._failed = True
                future.set_exception(error)  # type: ignore[arg-type]  # it takes errors
            else:
                future.set_result(gradient)

        work = background.submit(exchange, gradient.device)
        work.add_done_callback(complete)
        return future

    def backward(self, loss: Tensor) -> None:
        try:
            super().backward(loss)
        except RuntimeError as error:
            raise self._explained(error) from None
        if self._communicator.world_size > 1 and self.replica.is_last_microbatch:
            self.replica.clock.enter("other")
            self._meter.end_step()

    def _explained(self, error: RuntimeError) -> Exception:
        """What the group raises inside DDP as a line about the peers; other errors as they are."""
        is_peers = self._communicator.world_size > 1 and (self._failed or "gloo" in str(error))
        if not is_peers:
            return error
        rank, peers = self._communicator.rank, format_ranks(self._communicator.peers)
        cause = str(error).splitlines()[0].rpartition("] ")[2]
        return PeerError(f"rank {rank}: all_reduce with {peers}: {cause}")

    def step(self) -> None:
        self.replica.fill_missing_gradients()
        self.replica.update()

    def finish(self) -> None:
        if self._communicator.world_size > 1:
            self._meter.settle()
        if self._background is not None:
            # A thread that ends cuts off those who still receive from it.
            self._communicator.barrier().wait()
            self._background.close()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._to_rehearse = True
