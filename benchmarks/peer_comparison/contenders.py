"""The libraries that are compared, each used as its documentation recommends.

All train the same model with the same batch and optimizer in plain data parallelism: gradients are
averaged over the workers at every update. Options that make a library faster without changing the
result are set: gradients are views of the buckets, and buffers, which the forward pass does not
read, are not broadcast at every pass.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shm import communicator
from paceline.comm.torch_distributed import connect
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.process import keep_freed_memory

Update = Callable[[], Tensor]
"""Runs one update and returns the loss before it."""


class Contender(ABC):
    """One library on one worker."""

    rank: int
    world_size: int

    def connect(self) -> None:
        """Connect to the other workers by the environment variables."""
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    @abstractmethod
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        """Set up a model and its optimizer."""

    def release(self) -> None:  # noqa: B027 (most need nothing here)
        """Release what `prepare` created."""

    def tensor_to_sum(self, elements: int) -> Tensor:
        """A tensor in the memory that suits the library for repeated all-reduces."""
        return torch.empty(elements)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class Single(Contender):
    """A plain loop in one process."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        return plain_loop(model, optimizer, inputs, labels, torch.autograd.backward)


class TorchDdp(Contender):
    def connect(self) -> None:
        super().connect()
        dist.init_process_group("gloo")

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
        return plain_loop(wrapped, optimizer, inputs, labels, torch.autograd.backward)


class Fabric(Contender):
    def connect(self) -> None:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import DDPStrategy

        super().connect()
        strategy = DDPStrategy(
            process_group_backend="gloo", gradient_as_bucket_view=True, forward_sync_buffers=False
        )
        self._fabric: Any = Fabric(accelerator="cpu", devices=self.world_size, strategy=strategy)
        self._fabric.launch()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        wrapped, wrapped_optimizer = self._fabric.setup(model, optimizer)
        return plain_loop(wrapped, wrapped_optimizer, inputs, labels, self._fabric.backward)


class Accelerate(Contender):
    """Without its data loader, which would distribute and pad batches: data is resident."""

    def connect(self) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        super().connect()
        options = DistributedDataParallelKwargs(
            gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self._accelerator: Any = Accelerator(cpu=True, kwargs_handlers=[options])

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        wrapped, wrapped_optimizer = self._accelerator.prepare(model, optimizer)
        return plain_loop(wrapped, wrapped_optimizer, inputs, labels, self._accelerator.backward)

    def release(self) -> None:
        self._accelerator.free_memory()


class DeepSpeed(Contender):
    """Stage 0: nothing is sharded, as with all others.

    By default it clips gradients to a norm of 1, which no other library does.
    """

    _engine: Any = None

    def connect(self) -> None:
        import deepspeed

        super().connect()
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": len(inputs),
            "zero_optimization": {"stage": 0},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self._engine = engine

        def update() -> Tensor:
            loss = F.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            return loss

        return update

    def release(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
        self._engine = None


class Mpi(Contender):
    """A handwritten loop: all gradients in one tensor, summed after the backward pass."""

    def connect(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self.rank, self.world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        gradients = torch.zeros(sum(weight.numel() for weight in weights))
        parts = gradients.split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight)

        def update() -> Tensor:
            gradients.zero_()
            loss = F.cross_entropy(model(inputs), labels)
            (loss / self.world_size).backward()
            self.all_reduce(gradients)
            optimizer.step()
            return loss

        return update

    def all_reduce(self, tensor: Tensor) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, tensor.numpy())

    def close(self) -> None:
        self._mpi.Finalize()


def plain_loop(
    model: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    inputs: Tensor,
    labels: Tensor,
    backward: Callable[[Tensor], None],
) -> Update:
    def update() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        backward(loss)
        optimizer.step()
        return loss

    return update


class Paceline(Contender):
    """A strategy of paceline, with phase accounting as in a run."""

    def __init__(self, strategy: str) -> None:
        self._name = strategy
        self._strategy: Strategy | None = None
        self._shared_memory: Communicator | None = None

    def connect(self) -> None:
        super().connect()
        keep_freed_memory()
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._communicator = connect(Rendezvous(self.rank, self.world_size, address, port))

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor
    ) -> Update:
        replica = Replica(
            model=model,
            optimizer=optimizer,
            clock=PhaseClock(),
            forward=model,
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            communicator=self._communicator,
        )
        replica.batch_fraction = 1 / self.world_size
        strategy = self._strategy = create_strategy(self._name, {})
        strategy.setup(replica)

        def update() -> Tensor:
            replica.clock.enter("forward")
            loss = F.cross_entropy(replica.forward(inputs), labels)
            replica.clock.enter("backward")
            strategy.backward(loss * replica.batch_fraction)
            strategy.step()
            replica.clock.enter("other")
            return loss

        return update

    def release(self) -> None:
        if self._strategy is not None:
            self._strategy.finish()
        self._strategy = None

    def tensor_to_sum(self, elements: int) -> Tensor:
        return self._team().zeros(elements, torch.float32, torch.device("cpu"))

    def all_reduce(self, tensor: Tensor) -> None:
        self._team().all_reduce(tensor, "gradients").wait()

    def _team(self) -> Communicator:
        if self._shared_memory is None:
            self._shared_memory = communicator.connect(self._communicator)
        return self._shared_memory

    def close(self) -> None:
        self._communicator.barrier().wait()
        if self._shared_memory is not None:
            self._shared_memory.close()
        self._communicator.close()
