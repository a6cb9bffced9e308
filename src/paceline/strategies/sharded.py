"""The part of the weights that one worker updates, with the optimizer's state of that part alone.

Its optimizer is of the same class as the replica's and follows its settings, learning rate
included; the replica's own never steps and holds no state. Only optimizers that treat every element
by itself give the same result for a part as for the whole.

Optimizer state split over the workers (ZeRO, stages 1 and 2).

Every worker has all weights, and updates one chunk of them; so it needs the optimizer's state of
that chunk alone, a part of 1 / workers. All weights lie in one tensor, all gradients in another.
After the backward pass a reduce-scatter leaves on each worker the sum of its own chunk of the
gradients, the worker updates that chunk of the weights, and an all-gather hands the chunks around.
That is an all-reduce with the update in the middle: it moves the same bytes as averaging gradients
does, and computes the same weights."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
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
from paceline.errors import ConfigError
from paceline.strategies.checkpoint_state import (
    CheckpointState,
    ShardState,
    cut_shard,
    gather_shards,
)
from paceline.strategies.flat_buffer import FlatBuffer, padded_bytes
from paceline.strategies.optimizer_step import FusedSgdStep, overflow, step_unless_overflown
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import ModelShape, Strategy

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, RAdam, RMSprop, Rprop)


@dataclass(slots=True)
class ParameterShard:
    """Neighbouring elements of one weight."""

    weight: int
    """Its number among the optimizer's weights."""
    begin: int
    """The first element, in the order of the weight's memory."""
    values: nn.Parameter
    """Flat, in the memory of the weight itself; its `grad` is set by whoever has the sum."""


class ShardedOptimizer:
    def __init__(
        self,
        replica: Replica,
        weights: Sequence[nn.Parameter],
        pieces: list[ParameterShard],
        communicator: Communicator,
    ) -> None:
        """`weights` are the optimizer's, in its order; `pieces`, what this worker has of them.

        The communicator connects the workers who have all pieces between them, each once.
        """
        self._replica = replica
        self._communicator = communicator
        self._has_pieces = bool(pieces)
        self._weights = weights
        if not pieces:
            # A worker that got nothing still counts steps and takes part in agreements.
            nothing = nn.Parameter(torch.empty(0, dtype=weights[0].dtype, device=weights[0].device))
            nothing.grad = torch.empty_like(nothing)
            pieces = [ParameterShard(0, 0, nothing)]
        self._pieces = pieces
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        groups = []
        for group in replica.optimizer.param_groups:
            members = {numbers[id(weight)] for weight in group["params"] if id(weight) in numbers}
            own = [piece.values for piece in pieces if piece.weight in members]
            groups.append({**group, "params": own})
        self.optimizer = same_kind(replica.optimizer, groups)
        self._step = FusedSgdStep(self.optimizer)

    def update(self) -> None:
        """Clip by the norm of the whole gradient and apply the optimizer. Collective."""
        replica, scaler = self._replica, self._replica.scaler
        replica.clock.enter("update")
        for own, group in zip(
            self.optimizer.param_groups, replica.optimizer.param_groups, strict=True
        ):
            own.update({name: value for name, value in group.items() if name != "params"})
        if scaler.is_enabled():
            scaler.unscale_(self.optimizer)
        if scaler.is_enabled() or replica.clip_norm is not None:
            self._agree()
        if not self._has_pieces and not scaler.is_enabled():
            return
        step_unless_overflown(scaler, self._step)
        scaler.update()

    def _agree(self) -> None:
        """Learn the norm of the whole gradient, and whether any part of it left fp16's range."""
        gradients = [piece.values.grad for piece in self._pieces if piece.values.grad is not None]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in gradients]
        squares = torch.stack(norms).square().sum()
        scaler = self._replica.scaler
        overflown = (
            overflow(scaler, self.optimizer) if scaler.is_enabled() else squares.new_zeros(())
        )
        agreed = torch.stack([squares, overflown.to(torch.float64)])
        with self._replica.exposed_communication():
            self._communicator.all_reduce(agreed, "control").wait()
        overflown.copy_(agreed[1] > 0)
        if self._replica.clip_norm is not None:
            # As torch clips, so that one worker and several agree.
            factor = (self._replica.clip_norm / (agreed[0].sqrt() + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all weights on rank 0, without tensors elsewhere. Collective."""
        settings = self._replica.optimizer.state_dict()["param_groups"]
        tensors = [
            ShardState(piece.weight, piece.begin, self.optimizer.state.get(piece.values, {}))
            for piece in self._pieces
            if piece.values.numel()
        ]
        whole = gather_shards(self._communicator, self._weights, tensors)
        return {"state": whole, "param_groups": settings}

    def gather_over(self, communicator: Communicator) -> None:
        """Gather `state_dict` over another communicator; its ranks may hold copies of shards."""
        self._communicator = communicator

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards of the state of all weights."""
        self._replica.optimizer.load_state_dict({**state, "state": {}})
        own = self.optimizer.state_dict()
        order = [values for group in self.optimizer.param_groups for values in group["params"]]
        place = {id(values): number for number, values in enumerate(order)}
        own["state"] = {
            place[id(piece.values)]: cut_shard(
                state["state"][piece.weight],
                self._weights[piece.weight],
                slice(piece.begin, piece.begin + piece.values.numel()),
            )
            for piece in self._pieces
            if piece.weight in state["state"] and id(piece.values) in place
        }
        self.optimizer.load_state_dict(own)


def pieces_of_chunk(
    weights: Sequence[nn.Parameter],
    values: FlatBuffer,
    gradients: FlatBuffer,
    part: int,
    parts: int,
) -> list[ParameterShard]:
    """What of each weight lies in one of the chunks into which both memories are cut."""
    start = chunk_begin(values.tensor.numel(), parts, part)
    own_values = chunk(values.tensor, parts, part)
    own_gradients = chunk(gradients.tensor, parts, part)
    pieces = []
    for number, (offset, weight) in enumerate(zip(values.offsets, weights, strict=True)):
        begin = max(offset - start, 0)
        end = min(offset + weight.numel() - start, own_values.numel())
        if begin < end and weight.requires_grad:
            piece = nn.Parameter(own_values[begin:end])
            piece.grad = own_gradients[begin:end]
            pieces.append(ParameterShard(number, start + begin - offset, piece))
    return pieces


def optimizer_weights(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that it trains, in its order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def check_shardable(optimizer: Optimizer, strategy: str) -> None:
    """Refuse what cannot be cut into chunks that are updated each by itself."""
    if not isinstance(optimizer, ELEMENTWISE):
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            [
                f"--strategy {strategy}: cannot split {type(optimizer).__name__}; it splits"
                f" optimizers that treat every element by itself: {known}"
            ]
        )
    weights = optimizer_weights(optimizer)
    if len({(weight.dtype, weight.device) for weight in weights}) != 1:
        raise ConfigError([f"--strategy {strategy}: needs all weights of one dtype on one device"])


def same_kind(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new optimizer of the same class and defaults."""
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    return type(optimizer)(groups, **defaults)


class ShardedCheckpointState(CheckpointState):
    """State of ranks that each update a shard of the weights."""

    def __init__(self, replica: Replica, optimizer: ShardedOptimizer) -> None:
        super().__init__(replica)
        self._optimizer = optimizer

    def optimizer_state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class Sharded(Strategy):
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
        pieces = pieces_of_chunk(weights, self._weights, self._gradients, rank, workers)
        self.optimizer = ShardedOptimizer(replica, weights, pieces, replica.communicator)
        self.checkpoint = ShardedCheckpointState(replica, self.optimizer)

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
        """Of a ring's two halves; clipping and fp16 add an all-reduce of two numbers."""
        size_bytes = padded_bytes(shape.tensor_bytes, shape.workers)
        return Ring().cost(shape.workers, size_bytes, network)
