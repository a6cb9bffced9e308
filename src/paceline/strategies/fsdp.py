"""PyTorch's fully_shard: weights, gradients and optimizer state are sharded across the ranks.

Between updates each rank holds a shard of the rows of every weight. Block by block, the weights are
all-gathered for the forward pass, freed, and all-gathered again for the backward pass; gradients
are reduce-scattered. A block is a child module with weights, or a child of a plain container; one
that shares a weight with another belongs to the rest of the model, which keeps its weights between
the passes. This moves 1.5 times as much data as gradient averaging and uses the least memory.

Custom collectives replace those of fully_shard. They sum instead of averaging, because losses are
already weighted, and use the run's communicator, which counts and times them. If each rank has its
own GPU, NCCL runs the collectives in parallel with computation: traffic is then counted as for a
ring, and exposed communication is part of the forward and backward phases.
"""

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
from torch.utils._pytree import tree_leaves

from paceline.comm.buffers import chunk
from paceline.comm.cost import Cost, Network
from paceline.comm.torch_distributed import TorchCommunicator
from paceline.config import RunConfig
from paceline.errors import ConfigError, UserCodeError
from paceline.strategies.replica import Replica
from paceline.strategies.sharded import (
    ParameterShard,
    ShardedCheckpointState,
    ShardedOptimizer,
    check_shardable,
    optimizer_weights,
)
from paceline.strategies.strategy import ModelShape, Strategy, check_elementwise, check_uses_torch


class _Collective:
    """A collective of fully_shard, counted in the run's traffic."""

    def __init__(self, replica: Replica, uses_nccl: bool) -> None:
        """Without NCCL, tensors on a GPU are copied to main memory here.

        fully_shard uses its own streams, which the communicator does not synchronize with.
        """
        self._replica = replica
        self._communicator = replica.communicator
        self._uses_nccl = uses_nccl

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
        """Gather the output, which already contains the input as this rank's chunk."""
        if self._uses_nccl:
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
        """Reduce the input; `op` is always a sum."""
        if self._replica.noise.wants_own:
            self._replica.noise.add_own([input_tensor])
        if self._uses_nccl:
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
    """Shards the model with fully_shard; a single worker trains unsharded."""

    reports_own_gradients = True

    def check(self, config: RunConfig) -> list[str]:
        problems = check_uses_torch(config)
        if config.workers > 1:
            problems += check_elementwise(config)
            if config.compile:
                problems.append("--compile: not supported by strategy fsdp; remove one of them")
        return problems

    def setup(self, replica: Replica) -> None:
        if replica.communicator.world_size == 1:
            super().setup(replica)
            return
        communicator = _check(replica)
        super().setup(replica)
        names = {id(weight): name for name, weight in replica.model.named_parameters()}
        trained = [[names[id(weight)] for weight in group] for group in _groups(replica)]
        self.unsharded = _without_weights(replica)
        """A copy of the model without weights, which shares its buffers."""
        self._shard(replica.model, communicator)
        self.checkpoint.has_full_weights = False
        self._is_last_microbatch = True
        self._use_shards(replica, trained)
        self.checkpoint = FsdpCheckpointState(self)
        replica.forward = self._forward

    def _shard(self, model: nn.Module, communicator: TorchCommunicator) -> None:
        for weight in model.parameters():
            weight.data = weight.data.contiguous()
        device = next(model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # fully_shard uses the current device
        group = communicator.default_process_group()
        has_nccl = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
        mesh = DeviceMesh.from_group(group, device.type)
        self._modules: list[FSDPModule] = []
        """All blocks, then the model itself, which holds the remaining weights."""
        shared = set(_shared_names(model).values())
        # fully_shard does not support weights without elements.
        ignored = {weight for weight in model.parameters() if not weight.numel()}
        blocks = [block for block in _blocks(model) if shared.isdisjoint(block.parameters())]
        for module in [*blocks, model]:
            module.register_forward_hook(_clone_view)
            sharded = fully_shard(module, mesh=mesh, ignored_params=ignored)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # Ranks may use different weights; unused ones count as zero. Older versions of torch
            # require that all ranks use the same weights.
            if hasattr(sharded, "set_reduce_scatter_unused_params"):
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
            gather: Any = AllGather(self.replica, has_nccl)
            reduce: Any = ReduceScatter(self.replica, has_nccl)
            sharded.set_custom_all_gather(gather)
            sharded.set_custom_reduce_scatter(reduce)
            self._modules.append(sharded)
        self._model = model
        self._keep_after_forward(False)

    def _use_shards(self, replica: Replica, trained: list[list[str]]) -> None:
        """Replace the weights of replica and optimizer with their shards, which frees memory.

        `trained` holds the names of the weights of each parameter group.
        """
        sharded = dict(self._model.named_parameters())
        for group, names in zip(replica.optimizer.param_groups, trained, strict=True):
            group["params"] = [sharded[name] for name in names]
        replica.trainable = [weight for weight in sharded.values() if weight.requires_grad]
        weights = optimizer_weights(replica.optimizer)
        rank, workers = replica.communicator.rank, replica.communicator.world_size
        self._shards = []
        for index, weight in enumerate(weights):
            values = nn.Parameter(_local(weight).view(-1))
            if weight.requires_grad and values.numel() > 0:
                rows = _own_rows(len(weight), workers, rank)
                begin = rows.start * (weight.numel() // len(weight))
                self._shards.append(ParameterShard(index, begin, values))
        self.optimizer = ShardedOptimizer(replica, weights, self._shards, replica.communicator)
        self._weights = weights

    def _forward(self, *inputs: Any, **targets: Any) -> Any:
        if torch.is_grad_enabled() and self.replica.is_last_microbatch != self._is_last_microbatch:
            # Weights are gathered for the first microbatch and kept until the last, so ranks with
            # different numbers of microbatches run the same collectives.
            self._is_last_microbatch = self.replica.is_last_microbatch
            self._keep_after_forward(not self._is_last_microbatch)
            for module in self._modules:
                module.set_requires_gradient_sync(self._is_last_microbatch, recurse=False)
                module.set_reshard_after_backward(self._is_last_microbatch, recurse=False)
        outputs = self._model(*inputs, **targets)
        # fully_shard finds the tensors whose gradients start the backward pass of the model.
        if not any(isinstance(one, Tensor) for one in tree_leaves(outputs)):
            raise UserCodeError(
                f"--strategy fsdp: the model returned {type(outputs).__name__}: return a tensor,"
                " or a tuple, list or dict of tensors"
            )
        return outputs

    def _keep_after_forward(self, keep: bool) -> None:
        for module in self._modules[:-1]:
            module.set_reshard_after_forward(not keep, recurse=False)
        # The backward pass starts with the weights that the forward pass used last.
        self._modules[-1].set_reshard_after_forward(False, recurse=False)

    def step(self) -> None:
        if self.replica.communicator.world_size == 1:
            super().step()
            return
        for shard in self._shards:
            gradient = self._weights[shard.weight].grad
            shard.values.grad = (
                torch.zeros_like(shard.values) if gradient is None else _local(gradient).view(-1)
            )
        self.optimizer.update()
        self.replica.clear_gradients()

    @contextmanager
    def eval_weights(self) -> Iterator[None]:
        """Gather the weights once, because ranks evaluate different numbers of batches."""
        if self.checkpoint.has_full_weights:
            yield
            return
        with self.gathered():
            yield

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context manager inside which every rank holds all weights. Collective."""
        self._keep_after_forward(True)
        for module in self._modules:
            module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                module.reshard()
            self._keep_after_forward(not self._is_last_microbatch)

    def finish(self) -> None:
        if self.checkpoint.has_full_weights:
            return
        _fill(self.unsharded, self.checkpoint.model_state_dict())
        # Existing references to the model must refer to the unsharded model.
        self._model.__class__ = type(self.unsharded)
        self._model.__dict__.clear()
        self._model.__dict__.update(self.unsharded.__dict__)
        self.replica.forward = self._model
        self.checkpoint.has_full_weights = True

    def cost(self, shape: ModelShape, network: Network) -> Cost:
        """Return the cost of two all-gathers and a reduce-scatter of every tensor.

        Assumes that each tensor is a block and that its rows divide evenly. Larger blocks send
        fewer messages; padding adds a few bytes.
        """
        steps = 3 * (shape.workers - 1)
        moved = steps * shape.gradient_bytes / shape.workers
        messages = steps * len(shape.tensor_bytes)
        return Cost(network.seconds(messages, moved, moved / 3), moved, messages)


class FsdpCheckpointState(ShardedCheckpointState):
    """Checkpoint state of a model whose weights are sharded."""

    def __init__(self, strategy: Fsdp) -> None:
        super().__init__(strategy.replica, strategy.optimizer)
        self._strategy = strategy
        self.has_full_weights = False

    def model_state_dict(self) -> dict[str, Any]:
        if self.has_full_weights:
            return super().model_state_dict()
        state = dict(self._strategy.unsharded.state_dict())
        with self._strategy.gathered():
            full = {weight: weight.detach().clone() for weight in self.replica.model.parameters()}
            weights = self.replica.model.named_parameters(remove_duplicate=False)
            state.update((name, full[weight]) for name, weight in weights)
        return state

    def load_model_state_dict(self, state: dict[str, Any]) -> None:
        if self.has_full_weights:
            super().load_model_state_dict(state)
            return
        expected: dict[str, Tensor] = self._strategy.unsharded.state_dict()
        if state.keys() != expected.keys():
            raise ValueError(
                f"weights are missing or unexpected: {', '.join(state.keys() ^ expected.keys())}"
            )
        rank, workers = self.replica.communicator.rank, self.replica.communicator.world_size
        weights = dict(self.replica.model.named_parameters(remove_duplicate=False))
        for name, value in state.items():
            if value.shape != expected[name].shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}")
            if isinstance(weights.get(name), DTensor):
                _local(weights[name]).copy_(value[_own_rows(len(value), workers, rank)])
            else:
                expected[name].copy_(value)


def _check(replica: Replica) -> TorchCommunicator:
    """Raise ConfigError for models that fully_shard does not support."""
    communicator, model = replica.communicator, replica.model
    if not isinstance(communicator, TorchCommunicator):
        raise ConfigError(["--strategy fsdp: requires workers connected by torch.distributed"])
    check_shardable(replica.optimizer, "fsdp")
    scalars = {name for name, weight in model.named_parameters() if weight.dim() == 0}
    if scalars:
        raise ConfigError(
            [f"--strategy fsdp: cannot shard weight {min(scalars)}, which is a scalar"]
        )
    return communicator


def _shared_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the further names of weights that several modules share."""
    first = dict(model.named_parameters())
    every = model.named_parameters(remove_duplicate=False)
    return {name: weight for name, weight in every if name not in first}


def _groups(replica: Replica) -> list[list[nn.Parameter]]:
    return [group["params"] for group in replica.optimizer.param_groups]


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if type(child) in CONTAINERS:
            yield from _blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _without_weights(replica: Replica) -> nn.Module:
    """Return a copy of the model with weights on the meta device and the same buffers."""
    shared: list[Any] = [replica, replica.communicator, *replica.model.buffers()]
    memo: dict[int, Any] = {id(each): each for each in shared}
    for weight in replica.model.parameters():
        empty = torch.empty_like(weight, device="meta")
        memo[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
    return copy.deepcopy(replica.model, memo)


def _clone_view(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Copy outputs that are a view, such as those of a linear layer for sequences.

    An operation in place on a view would skip the hook by which fully_shard gathers the weights for
    the backward pass.
    """
    is_view = isinstance(outputs, Tensor) and outputs._is_view()
    return outputs.clone() if is_view else outputs


def _fill(model: nn.Module, state: dict[str, Any]) -> None:
    """Replace weights on the meta device; modules that share one still share it."""
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for name, empty in list(model.named_parameters(remove_duplicate=False)):
        if empty not in filled:
            filled[empty] = nn.Parameter(state[name], requires_grad=empty.requires_grad)
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, filled[empty])


def _own_rows(rows: int, workers: int, rank: int) -> slice:
    """Return the rows of a rank's shard, as fully_shard splits them."""
    size = -(-rows // workers)
    return slice(min(rank * size, rows), min((rank + 1) * size, rows))


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or all of an unsharded one."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
