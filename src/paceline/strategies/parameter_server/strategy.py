"""The `parameter_server` strategy: server processes hold the weights and the optimizer.

With several servers, each holds a contiguous shard of the flat weights. There are three modes:

- `sync`: servers sum the gradients of all workers, update, and send the new weights to all. The
  result equals that of a single process, up to rounding.
- `async`: a worker pulls the weights, computes a part of a global batch and pushes its gradient,
  which the servers apply immediately.
- `bounded`: like `async`, but no worker may be more than `staleness` iterations ahead of the
  slowest.

Idle asynchronous workers request parts of batches (assignments.py). Each push is an update with the
mean gradient of the part's samples. Its learning rate is that of the iteration times the part's
fraction of the global batch, so that updates and weight decay per sample are as large as in `sync`.
Gradients are clipped by the norm of the pushed mean gradient; in `sync`, by the norm of the sum.

Stale gradients make training less stable, especially with momentum: a learning rate near the
largest stable one of `sync` is too large for the other modes.

The launcher starts the servers; under torchrun or srun, the first worker of a node does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.connection import Connection
from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.errors import ConfigError
from paceline.strategies.checkpoint_state import CheckpointState
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.parameter_server.assignments import StalenessMeter
from paceline.strategies.parameter_server.client import ServerClient
from paceline.strategies.parameter_server.protocol import DTYPES, State
from paceline.strategies.parameter_server.server import Server
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import optimizer_weights
from paceline.strategies.strategy import (
    Assignment,
    AssignmentRequest,
    MakeOptimizer,
    ModelShape,
    ServerStrategy,
    check_elementwise,
)


class _Update(NamedTuple):
    """An asynchronous update that is still to be pushed."""

    assignment: Assignment
    rate: float | None
    """Learning rate; None if the batch had no samples for this worker."""


class ParameterServer(ServerStrategy):
    def __init__(
        self,
        *,
        mode: Literal["sync", "async", "bounded"] = "sync",
        staleness: int = 4,
        servers: int = 1,
        place: Literal["node0", "spread"] = "node0",
    ) -> None:
        """`place` puts all servers on node 0 or assigns them to the nodes round-robin."""
        check_option("staleness", staleness, minimum=0, maximum=10**9)
        check_option("servers", servers, minimum=1, maximum=1024)
        self.synchronous = self.replicas_equal = mode == "sync"
        self._mode, self._staleness = mode, staleness
        self._server_count, self._place = servers, place
        self.staleness = StalenessMeter(self._push)
        self.meter = None if self.synchronous else self.staleness
        self._unpushed: _Update | None = None
        """The update of the last asynchronous step, until it is pushed."""

    def server_nodes(self, nnodes: int) -> list[int]:
        is_spread = self._place == "spread"
        return [index % nnodes if is_spread else 0 for index in range(self._server_count)]

    def serve(
        self, index: int, workers: Sequence[Connection], make_optimizer: MakeOptimizer
    ) -> None:
        staleness = self._staleness if self._mode == "bounded" else None
        Server(workers, make_optimizer, staleness).serve()

    def check(self, config: RunConfig) -> list[str]:
        problems = []
        if config.precision == "fp16":
            problems.append(
                "--precision fp16: not supported by strategy parameter_server; use bf16"
            )
        if config.sync_bn and not self.synchronous:
            problems.append(f"--sync-bn: not supported with mode={self._mode}; use -o mode=sync")
        return problems + check_elementwise(config)

    def setup(self, replica: Replica) -> None:
        _check(replica)
        super().setup(replica)
        weights, decayed = _decayed_first(replica)
        elements = sum(weight.numel() for weight in weights)
        first = weights[0]
        self._servers = ServerClient(replica.servers, elements, first.dtype, decayed)
        memory, is_cpu = self._servers.memory, first.device.type == "cpu"
        self._weights = FlatBuffer(weights, memory=memory.weights if is_cpu else None)
        self._weights.hold_weights()
        self._gradients = FlatBuffer(weights, memory=memory.gradients if is_cpu else None)
        self._gradients.hold_gradients()
        self._servers.bind(self._weights.tensor, self._gradients.tensor)
        replica.flat_gradients = self._gradients.tensor
        checkpoint = ServerCheckpointState(replica, self._weights, self._servers)
        self.checkpoint = checkpoint
        checkpoint.initialize_servers({})

    def step(self) -> None:
        rate = float(self.replica.optimizer.param_groups[0]["lr"])
        if self.synchronous:
            noise = self.replica.noise
            with self.replica.exposed_communication():
                square = self._servers.step(rate, self.replica.clip_norm, noise.is_measuring)
            if noise.is_measuring and self.replica.communicator.rank == 0:
                noise.add_summed_square(square)
            self.replica.clear_gradients()
            return
        fraction, clip_norm = self.replica.batch_fraction, self.replica.clip_norm
        if fraction > 0:
            self._gradients.tensor.div_(fraction)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.replica.trainable, clip_norm)
        # The request for the next assignment takes the gradient along.
        self._unpushed = _Update(self._assignment, rate * fraction if fraction > 0 else None)

    def _push(self) -> None:
        """Push the gradient of the last step now, if no request has done so."""
        update = self._take_update()
        if update is not None:
            with self.replica.clock.during("exchange"):
                behind = self._servers.push(update.rate)
            self._complete_update(update, behind)

    def _take_update(self) -> _Update | None:
        # If the push fails, it is not repeated.
        update, self._unpushed = self._unpushed, None
        return update

    def _complete_update(self, update: _Update, behind: int) -> None:
        self.replica.clear_gradients()
        assignment = update.assignment
        self.staleness.add(
            iteration=assignment.iteration,
            part=assignment.part,
            ahead=assignment.ahead,
            behind=behind,
        )

    def next_assignment(self, request: AssignmentRequest) -> Assignment:
        update = self._take_update()
        with self.replica.clock.during("exchange"):
            behind, self._assignment = self._servers.push_and_assign(
                update.rate if update else None, request, self._mode == "bounded"
            )
        self.replica.clock.move("exchange", "wait", self._assignment.waited_seconds)
        if update is not None:
            self._complete_update(update, behind)
        return self._assignment

    def _pull(self) -> None:
        self._push()
        self._servers.pull()

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        if not self.synchronous:
            self._pull()
        yield

    def finish(self) -> None:
        if not self.synchronous:
            # The queue ends the run only after all pushes, so these are the final weights.
            self._pull()
        self._servers.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": self.staleness.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Checkpoints of other strategies have none.
        if "staleness" in state:
            self.staleness.load_state_dict(state["staleness"])

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the cost of a step: servers receive and sum all gradients, and reply with weights.

        For asynchronous modes, the cost of one worker's push and pull.
        """
        workers = shape.workers if self.synchronous else 1
        server_bytes = workers * shape.gradient_bytes / self._server_count
        bottleneck_bytes = max(server_bytes, shape.gradient_bytes)
        return Cost(
            seconds=network.seconds(2, 2 * bottleneck_bytes, server_bytes),
            bytes_sent=max(shape.gradient_bytes, server_bytes),
            messages=2 * self._server_count,
        )


class ServerCheckpointState(CheckpointState):
    """Checkpoint state of workers whose optimizer runs on the servers."""

    def __init__(self, replica: Replica, weights: FlatBuffer, servers: ServerClient) -> None:
        super().__init__(replica)
        self._weights = weights
        self._servers = servers
        ordered = optimizer_weights(replica.optimizer)
        positions = {id(weight): index for index, weight in enumerate(ordered)}
        self._indices = [positions[id(weight)] for weight in weights.weights]
        """Positions of the weights in the optimizer, whose groups may have another order."""

    def optimizer_state_dict(self) -> dict[str, Any]:
        state = super().optimizer_state_dict()
        saved = {} if self.replica.communicator.rank else self._servers.save()
        self._servers.barrier()
        if self.replica.communicator.rank:
            return state
        own: dict[int, dict[str, Any]] = {index: {} for index in self._indices}
        for name, value in saved.items():
            if isinstance(value, Tensor):
                values: list[Any] = self._weights.views_of(value)
            elif value is None:
                values = [None] * len(own)
            else:
                values = [torch.tensor(value) for _ in own]
            for index, each in zip(self._indices, values, strict=True):
                own[index][name] = each
        return {**state, "state": {index: each for index, each in own.items() if each}}

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        super().load_optimizer_state_dict({**state, "state": {}})
        names = state["state"].get(0, {})
        self.initialize_servers({name: self._flatten(name, state["state"]) for name in names})

    def initialize_servers(self, optimizer_state: State) -> None:
        """Send rank 0's weights and an optimizer state to the servers. Collective."""
        if self.replica.communicator.rank == 0:
            self._servers.begin()
            self._servers.load(optimizer_state)
        # Unlike the communicator's, this barrier has no timeout: rank 0 may wait for a slow server.
        self._servers.barrier()

    def _flatten(self, name: str, state: dict[int, dict[str, Any]]) -> Tensor | float | None:
        """Concatenate one entry of the optimizer state over all weights."""
        values = [state[index][name] for index in self._indices]
        if values[0] is None:
            return None
        if values[0].dim() == 0 and name == "step":
            return float(values[0])
        flat = torch.empty_like(self._weights.tensor, device="cpu")
        for view, value in zip(self._weights.views_of(flat), values, strict=True):
            view.copy_(value)
        return flat


def _check(replica: Replica) -> None:
    """Raise ConfigError for unsupported weights or missing servers."""
    problems = []
    if not replica.servers:
        problems.append("--strategy parameter_server: no servers were started")
    kinds = {weight.dtype for weight in replica.trainable}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        problems.append("--strategy parameter_server: requires weights of one floating-point dtype")
    if problems:
        raise ConfigError(problems)


def _decayed_first(replica: Replica) -> tuple[list[nn.Parameter], int]:
    """Return the trained weights, those without weight decay last, and the elements before them.

    A server then has at most one border between the two in its shard.
    """
    groups = replica.optimizer.param_groups
    decayed = {
        id(weight) for group in groups if group["weight_decay"] for weight in group["params"]
    }
    if not decayed:
        # No weight has any, and the order is that of the model.
        return replica.trainable, sum(weight.numel() for weight in replica.trainable)
    first = [weight for weight in replica.trainable if id(weight) in decayed]
    last = [weight for weight in replica.trainable if id(weight) not in decayed]
    return [*first, *last], sum(weight.numel() for weight in first)
