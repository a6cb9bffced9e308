"""PyTorch's DistributedDataParallel, measured like the other strategies.

DDP overlaps buckets with the backward pass as overlap.py does, in C++. A communication hook
replaces its all-reduce. The hook sums instead of averaging, because losses are already weighted,
and records when each bucket was ready and when its sum was complete.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not in __all__
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from paceline.comm.background import CommunicationThread
from paceline.comm.communicator import Communicator
from paceline.comm.shared_gpu import SharedGpuCommunicator
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.errors import ConfigError, PeerError, RunError
from paceline.formatting import format_ranks
from paceline.measure.timeline import Interval, Moment, timeline_of
from paceline.strategies.exchange_meter import ExchangeMeter
from paceline.strategies.gradient_averaging import KIND, GradientAveraging
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy, check_uses_torch


def shared_gpu_stream(communicator: Communicator) -> torch.cuda.Stream | None:
    """Return a stream for exchanges in the memory of a shared GPU; None if there are none."""
    if isinstance(communicator, SharedGpuCommunicator) and communicator.shares_memory:
        return torch.cuda.Stream(communicator.shared_gpu)
    return None


DDP_WARMUP_STEPS = 11
"""DDP times its first ten steps with CUDA events that a capture cannot contain."""


class Ddp(GradientAveraging):
    """Trains with DistributedDataParallel; a codec runs in a background thread."""

    reports_own_gradients = True

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
        """`find_unused` makes DDP search each pass for weights that the loss does not depend on."""
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
            raise ConfigError(["--strategy ddp: requires workers connected by torch.distributed"])
        # Not GradientAveraging.setup: DDP allocates the gradients itself.
        Strategy.setup(self, replica)
        if is_single:
            return
        assert isinstance(self._communicator, TorchCommunicator)
        self.warmup_steps = DDP_WARMUP_STEPS
        self._group: Any = self._communicator.default_process_group()
        if self.reducer.codec:
            self._background = CommunicationThread(self._communicator)
        self._timeline = timeline_of(replica.trainable[0].device)
        on_own_gpu = replica.trainable[0].device == self._communicator.gpu
        # The communicator of the background thread times its own transfers.
        self._uses_nccl = on_own_gpu and self._background is None
        self._side_stream = shared_gpu_stream(self._communicator)
        self.meter = self._meter = ExchangeMeter(replica, self._timeline)
        self._failed = self._is_dry_run = False
        # A codec keeps state per bucket, so the buckets must not change after the first step.
        self._needs_dry_run = self.reducer.codec is not None
        self._plain_forward = replica.forward
        module = replica.forward if isinstance(replica.forward, nn.Module) else replica.model
        self._wrapped = DistributedDataParallel(
            module,
            process_group=self._group,
            bucket_cap_mb=self._bucket_mib,
            init_sync=False,
            find_unused_parameters=self._find_unused,
        )
        # Buffers are averaged for evaluation only, not in every step.
        self._wrapped.require_forward_param_sync = False
        # DDP rejects annotations that are strings; a lambda has none.
        self._wrapped.register_comm_hook(None, lambda _, bucket: self._hook(bucket))
        replica.forward = self._forward

    def capture_obstacle(self) -> str | None:
        if self._communicator.world_size > 1 and self._find_unused:
            return "-o find_unused=true reads on the CPU which weights were used"
        return super().capture_obstacle()

    def replay_observers(self) -> list[Any]:
        meters = [] if self._communicator.world_size == 1 else [self._meter]
        # DDP's all-reduces run in torch's default group, which has a watchdog of its own.
        return [self._communicator.traffic, *meters]

    def _forward(self, *inputs: Any, **targets: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain_forward(*inputs, **targets)
        if self._needs_dry_run:
            self._dry_run(*inputs, **targets)
        # DDP reads this flag in the forward pass.
        self._wrapped.require_backward_grad_sync = self.replica.is_last_microbatch
        try:
            return self._wrapped(*inputs, **targets)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" in str(error):
                raise RunError(
                    "--strategy ddp: some weights are unused in the loss: add -o find_unused=true"
                ) from None
            raise self._translate(error) from None

    def _dry_run(self, *inputs: Any, **targets: Any) -> None:
        """Run a forward and backward pass without side effects, so that DDP has its final buckets.

        DDP rebuilds its buckets after the first pass. A resumed run must start with the final ones,
        because the order of summation depends on an element's position in its bucket.
        """
        self._needs_dry_run = False
        buffers = [(buffer, buffer.clone()) for buffer in self.replica.model.buffers()]
        self._wrapped.require_backward_grad_sync = self._is_dry_run = True
        device = self.replica.trainable[0].device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            outputs = tree_leaves(self._wrapped(*inputs, **targets))
            trained = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            torch.autograd.backward([one.sum() for one in trained])
        self._is_dry_run = False
        for buffer, before in buffers:
            buffer.copy_(before)
        self.replica.clear_gradients()

    def _hook(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the all-reduce of a full bucket; return a future of the sum."""
        gradient = bucket.buffer()
        if self._is_dry_run:
            unchanged: Future[Tensor] = Future()
            unchanged.set_result(gradient)
            return unchanged
        if self.replica.noise.wants_own:
            self.replica.noise.add_own([gradient])
        interval = self._meter.begin()
        if self._background is not None:
            return self._reduce_in_background(bucket, self._background, interval)
        if self._side_stream is not None:
            return self._reduce_on_shared_gpu(gradient, self._side_stream, interval)
        traffic, algorithm = self._communicator.traffic, self.reducer.algorithm
        rank, world = self._communicator.rank, self._communicator.world_size
        size = (world, gradient.numel(), gradient.element_size())
        transfer = traffic.begin(
            KIND,
            interval if self._uses_nccl else None,
            bytes_sent=algorithm.bytes_sent(rank, *size),
            bytes_received=algorithm.bytes_received(rank, *size),
            messages=2 * (world - 1),
        )

        def complete(future: Future[list[Tensor]]) -> Tensor:
            # NCCL's future calls this at once, on a stream that waits for the all-reduce.
            interval.ended = self._timeline.mark() if self._uses_nccl else perf_counter()
            traffic.end(transfer)
            try:
                return future.value()[0]
            except RuntimeError:
                self._failed = True
                raise

        started: Future[list[Tensor]] = self._group.allreduce([gradient]).get_future()
        completed: Future[Tensor] = started.then(complete)
        return completed

    def _reduce_on_shared_gpu(
        self, gradient: Tensor, side_stream: torch.cuda.Stream, interval: Interval
    ) -> Future[Tensor]:
        """Use the communicator, because torch's group would copy the gradient to the CPU."""
        future: Future[Tensor] = Future(devices=[gradient.device])
        work = self._communicator.all_reduce(gradient, KIND)
        # The future orders DDP behind the current stream, and the backward pass must not wait.
        with torch.cuda.stream(side_stream):
            work.wait()
            interval.ended = self._timeline.mark()
            future.set_result(gradient)
        return future

    def _reduce_in_background(
        self, bucket: GradBucket, background: CommunicationThread, interval: Interval
    ) -> Future[Tensor]:
        gradient, key = bucket.buffer(), str(bucket.index())
        shapes = [tuple(part.shape) for part in bucket.gradients()]
        future: Future[Tensor] = Future(devices=[gradient.device] if gradient.is_cuda else None)

        def reduce(communicator: Communicator) -> None:
            self.reducer.reduce(communicator, key, gradient, shapes)

        def complete(moment: Moment) -> None:
            interval.ended = moment
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - DDP raises it
                self._failed = True
                future.set_exception(error)  # type: ignore[arg-type]  # accepts any exception
            else:
                future.set_result(gradient)

        work = background.submit(reduce, gradient.device)
        work.add_done_callback(complete)
        return future

    def backward(self, loss: Tensor) -> None:
        try:
            super().backward(loss)
        except RuntimeError as error:
            raise self._translate(error) from None
        if self._communicator.world_size > 1 and self.replica.is_last_microbatch:
            self.replica.clock.enter("other")
            self._meter.end_step()

    def _translate(self, error: RuntimeError) -> Exception:
        """Convert an error of the process group to a PeerError; return others unchanged."""
        is_peer_error = self._communicator.world_size > 1 and (self._failed or "gloo" in str(error))
        if not is_peer_error:
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
            # Closing the thread's connections causes errors on peers that are still receiving.
            self._communicator.barrier().wait()
            self._background.close()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._needs_dry_run = True
