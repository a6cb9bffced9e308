"""A strategy of paceline's as a contender."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from comparison.contenders import Contender, Update
from paceline.comm.communicator import Communicator
from paceline.comm.rendezvous import Rendezvous
from paceline.comm.shm import communicator
from paceline.comm.torch_distributed import connect
from paceline.measure.phase_clock import PhaseClock
from paceline.strategies.options import create_strategy
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import Strategy
from paceline.training.process import keep_freed_memory


class Paceline(Contender):
    """With everything that a run has: time is accounted phase by phase."""

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
