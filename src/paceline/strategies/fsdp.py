"""The collectives that fully_shard calls, counted and timed like all others.

PyTorch's own fully_shard: weights, gradients and optimizer state split over the workers.

Between updates each worker has a part of every weight, 1 / workers of its rows. Block by block the
weights are gathered for the forward pass, freed, gathered again for the backward pass, and the
gradients are reduce-scattered; a block is a child of the model that has weights, or of a plain
container in it. That moves half as much again as averaging gradients does, and needs the least
memory.

fully_shard lets its collectives be replaced. Here they sum where it would average, since losses are
weighted already, and go through the run's communicator, counted and timed like any other. Where
every worker has a GPU of its own they stay NCCL's, which runs them beside the computation: their
bytes are then counted as a ring's, and the time they hold training up is part of forward and
backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.comm.buffers import chunk
from paceline.comm.cost import Cost, Network
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import (
    ParameterShard,
    ShardedCheckpointState,
    ShardedOptimizer,
    check_shardable,
    optimizer_weights,
)
from paceline.strategies.strategy import ModelShape, Strategy, check_uses_torch


class _Collective:
    """`beside`: let NCCL run it beside the computation, counted as one lap of a ring.

    Otherwise tensors on a GPU travel as copies in main memory, made here: fully_shard calls from
    streams of its own, with which the communicator's thread does not keep in step.
    """

    def __init__(self, replica: Replica, beside: bool) -> None:
        self._replica = replica
        self._communicator = replica.communicator
        self._beside = beside

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _count(self, whole: Tensor, kind: str) -> None:
        workers = self._communicator.world_size
        moved_bytes = whole.nbytes // workers * (workers - 1)
        traffic = self._communicator.traffic
        transfer = traffic.begin(
            kind, bytes_sent=moved_bytes, bytes_received=moved_bytes, messages=workers - 1
        )
        traffic.end(transfer)


class AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        """The input is this worker's chunk of the output already."""
        if self._beside:
            self._count(output_tensor, "parameters")
            group._allgather_base(output_tensor, input_tensor).wait()
            return
        with self._replica.exposed_communication():
            host = output_tensor.cpu()
            self._communicator.all_gather(host, "parameters").wait()
            if host is not output_tensor:
                output_tensor.copy_(host)


class ReduceScatter(_Collective):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`op` is a sum, as fully_shard was told."""
        if self._beside:
            self._count(input_tensor, "gradients")
            options = dist.ReduceScatterOptions()
            options.reduceOp = op
            group._reduce_scatter_base(output_tensor, input_tensor, options).wait()
            return
        with self._replica.exposed_communication():
            host = input_tensor.cpu()
            self._communicator.reduce_scatter(host, "gradients").wait()
            own = chunk(host, self._communicator.world_size, self._communicator.rank)
            output_tensor.copy_(own)


CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Fsdp(Strategy):
    """A single worker has nothing to split and trains as if alone."""

    def check(self, config: RunConfig) -> list[str]:
        is_split = config.compile and config.workers > 1
        problems = (
            ["--compile: not with --strategy fsdp; leave one of them out"] if is_split else []
        )
        return problems + check_uses_torch(config)

    def setup(self, replica: Replica) -> None:
        if replica.communicator.world_size == 1:
            super().setup(replica)
            return
        communicator = _check(replica)
        super().setup(replica)
        names = {id(weight): name for name, weight in replica.model.named_parameters()}
        trained = [[names[id(weight)] for weight in group] for group in _groups(replica)]
        self.unsharded = _without_weights(replica)
        """The model as it was, but for its weights; buffers are the same."""
        self._shard(replica.model, communicator)
        self.checkpoint.has_full_weights = False
        self._is_last_part = True
        self._follow(replica, trained)
        self.checkpoint = FsdpCheckpointState(self)
        replica.forward = self._forward

    def _shard(self, model: nn.Module, communicator: TorchCommunicator) -> None:
        for weight in model.parameters():
            weight.data = weight.data.contiguous()
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # fully_shard takes the current one
        group = communicator.default_process_group()
        has_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
        mesh = DeviceMesh.from_group(group, device.type)
        self._modules: list[FSDPModule] = []
        """The blocks, and last the model itself, which has the weights that no block has."""
        # Of a weight without elements it can make no parts.
        whole = {weight for weight in model.parameters() if not weight.numel()}
        for module in [*_blocks(model), model]:
            sharded = fully_shard(module, mesh=mesh, ignored_params=whole)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # Workers may use different weights, and those that one does not use are zeros to it.
            # Before torch could do so, all workers had to use the same.
            if hasattr(sharded, "set_reduce_scatter_unused_params"):
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
            gather: Any = AllGather(self.replica, has_nccl)
            reduce: Any = ReduceScatter(self.replica, has_nccl)
            sharded.set_custom_all_gather(gather)
            sharded.set_custom_reduce_scatter(reduce)
            self._modules.append(sharded)
        self._model = model
        self._keep_after_forward(False)

    def _follow(self, replica: Replica, trained: list[list[str]]) -> None:
        """Let the replica have the split weights in place of the whole ones, which are freed.

        `trained` names the weights of each of the optimizer's groups.
        """
        split = dict(self._model.named_parameters())
        for group, names in zip(replica.optimizer.param_groups, trained, strict=True):
            group["params"] = [split[name] for name in names]
        replica.trainable = [weight for weight in split.values() if weight.requires_grad]
        weights = optimizer_weights(replica.optimizer)
        rank, workers = replica.communicator.rank, replica.communicator.world_size
        self._pieces = []
        for number, weight in enumerate(weights):
            values = nn.Parameter(_local(weight).view(-1))
            if weight.requires_grad and values.numel() > 0:
                rows = _own_rows(len(weight), workers, rank)
                begin = rows.start * (weight.numel() // len(weight))
                self._pieces.append(ParameterShard(number, begin, values))
        self.optimizer = ShardedOptimizer(replica, weights, self._pieces, replica.communicator)
        self._weights = weights

    def _forward(self, inputs: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.replica.is_last_microbatch != self._is_last_part:
            # Gathered for the first part of a batch, kept for the others, split again after the
            # last: the same collectives on workers with few parts and with many.
            self._is_last_part = self.replica.is_last_microbatch
            self._keep_after_forward(not self._is_last_part)
            for module in self._modules:
                module.set_requires_gradient_sync(self._is_last_part, recurse=False)
                module.set_reshard_after_backward(self._is_last_part, recurse=False)
        outputs = self._model(inputs)
        assert isinstance(outputs, Tensor)
        return outputs

    def _keep_after_forward(self, keep: bool) -> None:
        for module in self._modules[:-1]:
            module.set_reshard_after_forward(not keep, recurse=False)
        # The backward pass begins with what the forward pass ended with.
        self._modules[-1].set_reshard_after_forward(False, recurse=False)

    def step(self) -> None:
        if self.replica.communicator.world_size == 1:
            super().step()
            return
        for piece in self._pieces:
            gradient = self._weights[piece.weight].grad
            piece.values.grad = (
                torch.zeros_like(piece.values) if gradient is None else _local(gradient).view(-1)
            )
        self.optimizer.update()
        self.replica.clear_gradients()

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Workers evaluate different numbers of batches, so the weights are gathered only once."""
        if self.checkpoint.has_full_weights:
            yield
            return
        with self.gathered():
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, the model has all its weights on every worker. Collective."""
        self._keep_after_forward(True)
        for module in self._modules:
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
            self._keep_after_forward(not self._is_last_part)

    def finish(self) -> None:
        if self.checkpoint.has_full_weights:
            return
        self.unsharded.load_state_dict(self.checkpoint.model_state_dict(), assign=True)
        # The model that others hold becomes the ordinary one.
        self._model.__class__ = type(self.unsharded)
        self._model.__dict__.clear()
        self._model.__dict__.update(self.unsharded.__dict__)
        self.replica.forward = self._model
        self.checkpoint.has_full_weights = True

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Two all-gathers and a reduce-scatter of every tensor, each as a ring's half.

        As if each tensor were a block of its own and had rows for all workers alike: blocks of
        several tensors send fewer messages, padding adds a few bytes.
        """
        steps = 3 * (shape.workers - 1)
        moved = steps * shape.gradient_bytes / shape.workers
        messages = steps * len(shape.tensor_bytes)
        return Cost(network.seconds(messages, moved, moved / 3), moved, messages)


class FsdpCheckpointState(ShardedCheckpointState):
    """Gathers the model's weights; rank 0 gathers the optimizer's state."""

    def __init__(self, strategy: Fsdp) -> None:
        super().__init__(strategy.replica, strategy.optimizer)
        self._strategy = strategy
        self.has_full_weights = False

    def model_state_dict(self) -> dict[str, Any]:
        if self.has_full_weights:
            return super().model_state_dict()
        state = dict(self._strategy.unsharded.state_dict())
        with self._strategy.gathered():
            weights = self.replica.model.named_parameters()
            state.update((name, weight.detach().clone()) for name, weight in weights)
        return state

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        if self.has_full_weights:
            super().load_model_state_dict(state)
            return
        expected: dict[str, Tensor] = self._strategy.unsharded.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(f"other weights: {', '.join(state.keys() ^ expected.keys())}")
        rank, workers = self.replica.communicator.rank, self.replica.communicator.world_size
        weights = dict(self.replica.model.named_parameters())
        for name, value in state.items():
            if value.shape != expected[name].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}")
            if isinstance(weights.get(name), DTensor):
                _local(weights[name]).copy_(value[_own_rows(len(value), workers, rank)])
            else:
                expected[name].copy_(value)


def _check(replica: Replica) -> TorchCommunicator:
    """Refuse what fully_shard cannot split."""
    communicator, model = replica.communicator, replica.model
    if not isinstance(communicator, TorchCommunicator):
        raise ConfigError(["--strategy fsdp: needs workers that torch.distributed connects"])
    check_shardable(replica.optimizer, "fsdp")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared = set(names) - {name for name, _ in model.named_parameters()}
    scalars = {name for name, weight in model.named_parameters() if weight.dim() == 0}
    for problem, found in (("is shared by two layers", shared), ("is a single number", scalars)):
        if found:
            text = f"--strategy fsdp: cannot split weight {min(found)}, which {problem}"
            raise ConfigError([text])
    return communicator


def _groups(replica: Replica) -> list[list[nn.Parameter]]:
    return [group["params"] for group in replica.optimizer.param_groups]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if type(child) in CONTAINERS:
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _without_weights(replica: Replica) -> nn.Module:
    """A copy of the model whose weights take no memory, and whose buffers are the model's."""
    kept: list[Any] = [replica, replica.communicator, *replica.model.buffers()]
    memory: dict[int, Any] = {id(each): each for each in kept}
    for weight in replica.model.parameters():
        empty = torch.empty_like(weight, device="meta")
        memory[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    return copy.deepcopy(replica.model, memory)


def _own_rows(rows: int, workers: int, rank: int) -> slice:
    """As fully_shard deals them: all parts but the last ones are of one size."""
    size = -(-rows // workers)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this worker has; all of one that is not split."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
