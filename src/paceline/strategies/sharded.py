"""Optimizer state sharded across the ranks (ZeRO stages 1 and 2).

Every rank holds all weights and updates one shard of them, so it needs only that shard's optimizer
state. Weights and gradients are two flat buffers. After the backward pass, a reduce-scatter sums
one shard of the gradients on each rank, the rank updates its shard of the weights, and an
all-gather distributes the shards. This is an all-reduce with the update in the middle: it moves as
many bytes as gradient averaging and computes the same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from paceline.comm.algorithms.ring import Ring
from paceline.comm.buffers import chunk, chunk_begin
from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.strategies.checkpoint_state import (
    CheckpointState,
    ShardState,
    extract_shard,
    gather_shards,
)
from paceline.strategies.flat_buffer import FlatBuffer, padded_bytes
from paceline.strategies.optimizer_step import (
    FusedSgdStep,
    lacks_momentum,
    overflow,
    step_unless_overflow,
)
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape, Strategy, check_elementwise

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop)


@dataclass(slots=True)
class ParameterShard:
    """Contiguous elements of one weight."""

    weight: int
    """Index of the weight in the optimizer."""
    begin: int
    """Index of the first element, in memory order."""
    values: nn.Parameter
    """A flat view of the weight's memory; its `grad` is the summed gradient."""

    @property
    def elements(self) -> slice:
        """The elements of the weight, in memory order."""
        return slice(self.begin, self.begin + self.values.numel())


class ShardedOptimizer:
    """Updates one rank's shards of the weights and holds their optimizer state.

    The optimizer has the class and settings of the replica's optimizer, which itself never steps
    and has no state. Only elementwise optimizers compute the same result for a shard as for all
    weights.
    """

    def __init__(
        self,
        replica: Replica,
        weights: Sequence[nn.Parameter],
        shards: list[ParameterShard],
        communicator: Communicator,
    ) -> None:
        """`weights` are those of the replica's optimizer; `shards` are this rank's parts of them.

        Each shard is on exactly one rank of the communicator.
        """
        self._replica = replica
        self._communicator = communicator
        self._has_shards = bool(shards)
        # Hosts that share their weights each have all shards.
        is_only_copy = communicator.world_size == replica.communicator.world_size
        self._is_measured = self._has_shards and (is_only_copy or replica.node == 0)
        self._weights = weights
        if not shards:
            # A rank without shards still counts steps and takes part in collectives.
            empty = nn.Parameter(torch.empty(0, dtype=weights[0].dtype, device=weights[0].device))
            empty.grad = torch.empty_like(empty)
            shards = [ParameterShard(0, 0, empty)]
        self._shards = shards
        indices = {id(weight): index for index, weight in enumerate(weights)}
        groups = []
        for group in replica.optimizer.param_groups:
            members = {indices[id(weight)] for weight in group["params"] if id(weight) in indices}
            own = [shard.values for shard in shards if shard.weight in members]
            groups.append({**group, "params": own})
        self.optimizer = new_optimizer(replica.optimizer, groups)
        self._step = FusedSgdStep(self.optimizer)

    def update(self) -> None:
        """Clip by the global gradient norm and run the optimizer. Collective."""
        replica, scaler = self._replica, self._replica.scaler
        replica.clock.enter("update")
        if replica.noise.is_measuring and self._is_measured:
            replica.noise.add_summed(self._gradients())
        for own, group in zip(
            self.optimizer.param_groups, replica.optimizer.param_groups, strict=True
        ):
            own.update({name: value for name, value in group.items() if name != "params"})
        if scaler.is_enabled():
            scaler.unscale_(self.optimizer)
        if scaler.is_enabled() or replica.clip_norm is not None:
            self._reduce_norm()
        if not self._has_shards and not scaler.is_enabled():
            return
        step_unless_overflow(scaler, self._step)
        scaler.update()

    def _gradients(self) -> list[Tensor]:
        return [shard.values.grad for shard in self._shards if shard.values.grad is not None]

    def _reduce_norm(self) -> None:
        """Clip by the global gradient norm and all-reduce the fp16 overflow flag. Collective."""
        gradients = self._gradients()
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradients]
        squares = torch.stack(norms).square().sum()
        scaler = self._replica.scaler
        overflowed = (
            overflow(scaler, self.optimizer) if scaler.is_enabled() else squares.new_zeros(())
        )
        reduced = torch.stack([squares, overflowed.to(torch.float64)])
        with self._replica.exposed_communication():
            self._communicator.all_reduce(reduced, "control").wait()
        overflowed.copy_(reduced[1] > 0)
        if self._replica.clip_norm is not None:
            # The formula of torch.nn.utils.clip_grad_norm_.
            factor = (self._replica.clip_norm / (reduced[0].sqrt() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all weights; only rank 0's contains tensors. Collective."""
        settings = self._replica.optimizer.state_dict()["param_groups"]
        tensors = [
            ShardState(shard.weight, shard.begin, self.optimizer.state.get(shard.values, {}))
            for shard in self._shards
            if shard.values.numel()
        ]
        whole = gather_shards(self._communicator, self._weights, tensors)
        return {"state": whole, "param_groups": settings}

    def gather_over(self, communicator: Communicator) -> None:
        """Use another communicator for `state_dict`; its ranks may hold copies of shards."""
        self._communicator = communicator

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards of the state of all weights."""
        self._replica.optimizer.load_state_dict({**state, "state": {}})
        own = self.optimizer.state_dict()
        ordered = [values for group in self.optimizer.param_groups for values in group["params"]]
        positions = {id(values): position for position, values in enumerate(ordered)}
        own["state"] = {
            positions[id(shard.values)]: extract_shard(
                state["state"][shard.weight],
                self._weights[shard.weight],
                shard.elements,
            )
            for shard in self._shards
            if shard.weight in state["state"] and id(shard.values) in positions
        }
        self.optimizer.load_state_dict(own)


def shards_of_chunk(
    weights: Sequence[nn.Parameter],
    values: FlatBuffer,
    gradients: FlatBuffer,
    index: int,
    chunks: int,
) -> list[ParameterShard]:
    """Return the shards of the weights in one chunk of the two flat buffers."""
    start = chunk_begin(values.tensor.numel(), chunks, index)
    own_values = chunk(values.tensor, chunks, index)
    own_gradients = chunk(gradients.tensor, chunks, index)
    shards = []
    for weight_index, (offset, weight) in enumerate(zip(values.offsets, weights, strict=True)):
        begin = max(offset - start, 0)
        end = min(offset + weight.numel() - start, own_values.numel())
        if begin < end and weight.requires_grad:
            shard = nn.Parameter(own_values[begin:end])
            shard.grad = own_gradients[begin:end]
            shards.append(ParameterShard(weight_index, start + begin - offset, shard))
    return shards


def optimizer_weights(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the weights of an optimizer, in order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def check_shardable(optimizer: Optimizer, strategy: str) -> None:
    """Raise ConfigError if shards of the weights cannot be updated separately."""
    if not isinstance(optimizer, ELEMENTWISE):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            [
                f"--strategy {strategy}: cannot shard {type(optimizer).__name__};"
                f" use an elementwise optimizer: {known}"
            ]
        )
    weights = optimizer_weights(optimizer)
    if len({(weight.dtype, weight.device) for weight in weights}) != 1:
        raise ConfigError([f"--strategy {strategy}: requires weights of one dtype on one device"])


def new_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Create an optimizer with the class and defaults of an existing one."""
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return type(optimizer)(groups, **defaults)


class ShardedCheckpointState(CheckpointState):
    """Checkpoint state if each rank updates a shard of the weights."""

    def __init__(self, replica: Replica, optimizer: ShardedOptimizer) -> None:
        super().__init__(replica)
        self._optimizer = optimizer

    def optimizer_state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class Sharded(Strategy):
    """Shards optimizer state (ZeRO stages 1 and 2)."""

    def check(self, config: RunConfig) -> list[str]:
        return check_elementwise(config)

    def setup(self, replica: Replica) -> None:
        check_shardable(replica.optimizer, "sharded")
        super().setup(replica)
        weights = optimizer_weights(replica.optimizer)
        rank, workers = replica.communicator.rank, replica.communicator.world_size
        self._weights = FlatBuffer(weights, shards=workers)
        self._gradients = FlatBuffer(weights, shards=workers)
        self._weights.hold_weights()
        self._gradients.hold_gradients()
        replica.flat_gradients = self._gradients.tensor
        shards = shards_of_chunk(weights, self._weights, self._gradients, rank, workers)
        self.optimizer = ShardedOptimizer(replica, weights, shards, replica.communicator)
        self.checkpoint = ShardedCheckpointState(replica, self.optimizer)

    def capture_obstacle(self) -> str | None:
        return self.replica.communicator.capture_obstacle()

    def is_warm(self) -> bool:
        # The replica's own optimizer has no state.
        return not (self.replica.scaler.is_enabled() and lacks_momentum(self.optimizer.optimizer))

    def step(self) -> None:
        replica, communicator = self.replica, self.replica.communicator
        with replica.exposed_communication():
            communicator.reduce_scatter(self._gradients.tensor, "gradients").wait()
        self.optimizer.update()
        with replica.exposed_communication():
            communicator.all_gather(self._weights.tensor, "parameters").wait()
        replica.clock.enter("update")
        replica.clear_gradients()

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the cost of a ring; clipping and fp16 add an all-reduce of two numbers."""
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        return Ring().cost(shape.workers, size_bytes, network)
