"""Parameter servers: processes of their own hold the weights and the optimizer; workers ask them.

With several servers each holds a contiguous shard of the flat weights. Three modes:

- `sync`: a server waits for the gradients of all workers, adds them up, updates, and sends everyone
  the new weights: what one worker computes alone, up to rounding.
- `async`: an update is applied when it comes, and nobody waits. A worker pulls the weights,
  computes a part of a global batch, and pushes its gradient.
- `bounded`: the same, but nobody may get more than `staleness` iterations ahead of the slowest.

Out of step, parts of batches go to whoever is free (server/dealer.py). Each push is an update with
the mean gradient of its own samples, at the learning rate of its iteration times its share of the
global batch: so as many samples move the weights as far as in `sync`, and weight decay is as
strong, with any optimizer. Clipping is then by the norm of the worker's own mean gradient; in
`sync` by that of the sum, over all shards.

An update from older weights overshoots sooner, most of all with momentum: a learning rate that is
near the largest that works in step is too large out of step.

Our own launcher starts the servers; where torchrun or srun started the workers, the first worker of
a node does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.comm.cost import Cost, Network
from paceline.config import RunConfig
from paceline.config.conversion import check_option
from paceline.errors import ConfigError
from paceline.strategies.checkpoint_state import CheckpointState
from paceline.strategies.flat_buffer import FlatBuffer
from paceline.strategies.parameter_server.assignments import StalenessMeter
from paceline.strategies.parameter_server.client import ServerClient
from paceline.strategies.parameter_server.protocol import DTYPES, ServerConnection
from paceline.strategies.parameter_server.server import Server, State
from paceline.strategies.replica import Replica
from paceline.strategies.strategy import (
    Assignment,
    AssignmentRequest,
    MakeOptimizer,
    ModelShape,
    ServerStrategy,
)


class ParameterServer(ServerStrategy):
    def __init__(
        self,
        *,
        mode: Literal["sync", "async", "bounded"] = "sync",
        staleness: int = 4,
        servers: int = 1,
        place: Literal["node0", "spread"] = "node0",
    ) -> None:
        """`place`: all servers on the first node, or dealt out to the nodes in turn."""
        check_option("staleness", staleness, minimum=0, maximum=10**9)
        check_option("servers", servers, minimum=1, maximum=1024)
        self.synchronous = self.replicas_equal = mode == "sync"
        self._mode, self._staleness = mode, staleness
        self._server_count, self._place = servers, place
        self.staleness = StalenessMeter()
        self.meter = None if self.synchronous else self.staleness

    def server_nodes(self, nnodes: int) -> list[int]:
        spread = self._place == "spread"
        return [number % nnodes if spread else 0 for number in range(self._server_count)]

    def serve(
        self, index: int, workers: Sequence[Communicator], make_optimizer: MakeOptimizer
    ) -> None:
        links = [
            ServerConnection(communicator, f"server {index}", f"rank {rank}")
            for rank, communicator in enumerate(workers)
        ]
        staleness = self._staleness if self._mode == "bounded" else None
        Server(links, make_optimizer, staleness).serve()

    def check(self, config: RunConfig) -> list[str]:
        problems = []
        if config.precision == "fp16":
            problems.append(
                "--precision fp16: not supported by strategy parameter_server; use bf16"
            )
        if config.sync_bn and not self.synchronous:
            problems.append(f"--sync-bn: workers of mode={self._mode} never meet; use mode=sync")
        return problems

    def setup(self, replica: Replica) -> None:
        _check(replica)
        super().setup(replica)
        rank = replica.communicator.rank
        self._weights = FlatBuffer(replica.trainable)
        self._weights.hold_weights()
        self._gradients = FlatBuffer(replica.trainable)
        self._gradients.hold_gradients()
        replica.flat_gradients = self._gradients.tensor
        links = [
            ServerConnection(communicator, f"rank {rank}", f"server {number}")
            for number, communicator in enumerate(replica.servers)
        ]
        self._servers = ServerClient(links, self._weights.tensor, self._gradients.tensor)
        checkpoint = ServerCheckpointState(replica, self._weights, self._servers)
        self.checkpoint = checkpoint
        checkpoint.initialize_servers({})

    def step(self) -> None:
        rate = self.replica.optimizer.param_groups[0]["lr"]
        if self.synchronous:
            with self.replica.exposed_communication():
                self._servers.step(rate, self.replica.clip_norm)
        else:
            self._push(rate)
        self.replica.clear_gradients()

    def _push(self, rate: float) -> None:
        share, clip_norm = self.replica.batch_fraction, self.replica.clip_norm
        behind = 0
        if share > 0:
            self._gradients.tensor.div_(share)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.replica.trainable, clip_norm)
            with self.replica.clock.during("exchange"):
                behind = self._servers.push(rate * share)
        else:
            self._servers.done()
        turn, ahead = self._turn
        self.staleness.note(iteration=turn.iteration, part=turn.part, ahead=ahead, behind=behind)

    def next_assignment(self, request: AssignmentRequest) -> Assignment:
        with self.replica.clock.during("exchange"):
            deal = self._servers.next_assignment(request)
        self.replica.clock.move("exchange", "wait", deal.waited_seconds)
        self._turn = (deal.turn, deal.ahead)
        return deal.turn

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        if not self.synchronous:
            self._servers.pull()
        yield

    def finish(self) -> None:
        if not self.synchronous:
            # All updates are applied: nobody is told to end before everyone has pushed the last.
            self._servers.pull()
        self._servers.finished()

    def state_dict(self) -> dict[str, Any]:
        return {"staleness": self.staleness.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.staleness.load_state_dict(state["staleness"])

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Of an update in step: every server takes in its shard's gradients one after the other,
        adds them up, and sends as much back. Out of step: of one worker's push and pull."""
        workers = shape.workers if self.synchronous else 1
        at_server = workers * shape.gradient_bytes / self._server_count
        through = max(at_server, shape.gradient_bytes)
        return Cost(
            seconds=network.seconds(2, 2 * through, at_server),
            bytes_sent=max(shape.gradient_bytes, at_server),
            messages=2 * self._server_count,
        )


class ServerCheckpointState(CheckpointState):
    """State of workers whose optimizer runs on the servers."""

    def __init__(self, replica: Replica, weights: FlatBuffer, servers: ServerClient) -> None:
        super().__init__(replica)
        self._weights = weights
        self._servers = servers

    def optimizer_state_dict(self) -> dict[str, Any]:
        state = super().optimizer_state_dict()
        saved = {} if self.replica.communicator.rank else self._servers.save()
        self._servers.barrier()
        if self.replica.communicator.rank:
            return state
        count = len(self.replica.trainable)
        own: dict[int, dict[str, Any]] = {index: {} for index in range(count)}
        for name, value in saved.items():
            if isinstance(value, Tensor):
                values: list[Any] = self._weights.views_of(value)
            elif value is None:
                values = [None] * count
            else:
                values = [torch.tensor(value) for _ in own]
            for index, each in enumerate(values):
                own[index][name] = each
        return {**state, "state": {index: each for index, each in own.items() if each}}

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        super().load_optimizer_state_dict({**state, "state": {}})
        names = state["state"].get(0, {})
        self.initialize_servers({name: self._flatten(name, state["state"]) for name in names})

    def initialize_servers(self, optimizer_state: State) -> None:
        """Send the servers rank 0's weights and an optimizer state. Collective."""
        if self.replica.communicator.rank == 0:
            self._servers.begin()
            self._servers.load(optimizer_state)
        # A barrier at the server has no timeout while rank 0 waits for a slow server.
        self._servers.barrier()

    def _flatten(self, name: str, state: dict[int, dict[str, Any]]) -> Tensor | float | None:
        """Join one value of the optimizer's state of all weights."""
        values = [state[index][name] for index in sorted(state)]
        if values[0] is None:
            return None
        if values[0].dim() == 0 and name == "step":
            return float(values[0])
        flat = torch.empty_like(self._weights.tensor, device="cpu")
        for view, value in zip(self._weights.views_of(flat), values, strict=True):
            view.copy_(value)
        return flat


def _check(replica: Replica) -> None:
    """Refuse what no server could hold."""
    problems = []
    if not replica.servers:
        problems.append("--strategy parameter_server: needs servers, and nobody started them")
    kinds = {weight.dtype for weight in replica.trainable}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        problems.append("--strategy parameter_server: needs all weights of one kind of float")
    if problems:
        raise ConfigError(problems)
